"""A run of the tiny model without an engine: the trainer's ranks on random samples, with a receipt and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.checkpoints.hf_config import read_hf_config
from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.data.train_data import make_rank_data
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.receipts.chain import compute_hash
from slime.rollout.debug_data import save_debug_rollout_data
from slime.rules.resolve import resolve
from vime.testing.ranks import run_ranks
from vime.testing.trainer import GROUPS, PER_GROUP, make_samples

STEPS = 3
ROLLOUT = GROUPS * PER_GROUP


def make_config(model: Path, run: Path, ranks: int = 1, **flags: object) -> Config:
    """Returns the flags of the run: two optimizer steps per rollout, and a checkpoint after each rollout."""
    settings: dict[str, object] = {
        **{"hf_checkpoint": str(model), "weight_dir": str(run / "weights"), "run_dir": str(run)},
        **{"device": "cpu", "fp32": True, "actor_num_gpus_per_node": ranks, "rm_type": "zero"},
        **{
            "rollout_batch_size": GROUPS,
            "n_samples_per_prompt": PER_GROUP,
            "global_batch_size": ROLLOUT // 2,
        },
        **{"num_rollout": STEPS, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "lr": 1e-2},
        **{
            "distributed_timeout_minutes": 2,
            "save": str(run / "checkpoints"),
            "save_interval": 1,
            "receipt": True,
        },
        **{"debug_train_only": True},
    }
    return resolve({**settings, **flags})


def record_run(model: Path, run: Path, ranks: int = 1, **flags: object) -> Path:
    """Trains the rollouts and returns the run directory."""
    config = make_config(model, run, ranks, **flags)
    run.mkdir(parents=True)
    config.save_json(run / "config.json")
    template = config.debug.save_debug_rollout_data
    assert template is not None
    for rollout in range(STEPS):
        samples = make_samples(seed=rollout)
        groups = [samples[i : i + PER_GROUP] for i in range(0, ROLLOUT, PER_GROUP)]
        save_debug_rollout_data(template, rollout, groups)
    run_ranks(train_rank, ranks, (config, run))
    return run


def train_rank(rank: int, config: Config, run: Path) -> None:
    """Trains as one rank."""
    trainer = MegatronTrainer(config, rank, config.world_size, init_method=f"file://{run}/store")
    try:
        hf_config = read_hf_config(config.rollout.hf_checkpoint)
        for rollout in range(STEPS):
            samples = make_samples(seed=rollout)
            data = make_rank_data(config, Hooks(config), samples, config.data_parallel_size, hf_config)
            trainer.train(rollout, data[trainer.info.dp_rank])
            trainer.save(rollout)
    finally:
        trainer.close()


def read_lines(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Returns the records of a receipt without a check."""
    return [json.loads(line) for line in (run / "receipt" / f"trainer-{rank}.jsonl").read_text().splitlines()]


def write_lines(run: Path, records: list[dict[str, Any]], rank: int = 0) -> None:
    """Replaces the receipt of a rank."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run / "receipt" / f"trainer-{rank}.jsonl").write_text(text)


def chain_again(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records with new numbers and hashes, as someone without the key can make them."""
    previous = ""
    for number, record in enumerate(records):
        record |= {"number": number, "previous": previous}
        record["hash"] = previous = compute_hash(record)
    return records
