"""`vime audit`: runs a saved rollout through the trainer and a real engine, and splits the difference into its parts.

trainer, training rows - engine decode   difference in training
  = trainer - engine prefill             two programs, the same tokens at once
  + engine prefill - engine decode       one program, all tokens at once or one by one
trainer, engine: other batch layouts     one program, the same tokens in another batch
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slime.config import Config
from vime.audit.prefill import PrefillEngine
from vime.audit.report import LogProbDifference, active, as_json, compare, draw, table
from vime.audit.source import AuditSource, find_weights, one_rank, read_config, read_source
from vime.pool.engine_flags import engine_dtype
from vime.vllm.fp8 import quantizes

TRAINING, DECODE = "trainer, training rows", "engine decode"
MOST_ALONE = 64  # most requests that run one by one
PREFILL, ALONE = "engine prefill", "engine prefill, one by one"


def main(argv: Sequence[str]) -> int:
    """Audits one rollout. Prints a table and writes RUN_DIR/audit/rollout_N.json and .png. Raises ValueError for bad
    input."""
    parser = argparse.ArgumentParser(prog="vime audit", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, help="a run directory with saved rollouts")
    parser.add_argument("--rollout", type=int, help="which saved rollout (default: the first)")
    parser.add_argument("--samples", type=int, default=256, help="about how many samples (default: 256)")
    parser.add_argument("--weights", help="Hugging Face directory with the weights that drew the rollout")
    options = parser.parse_args(argv)
    config = read_config(options.run_dir)
    if options.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {options.samples}")
    source = read_source(options.run_dir, config, options.rollout, options.samples)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as scratch:
        # Megatron and torch warn about packages that are not installed and about their own deprecations.
        warnings.simplefilter("ignore")
        weights = options.weights or find_weights(config, source.version, Path(scratch))
        pairs = audit(config, source, weights, Path(scratch))
    report(options.run_dir, config, source, weights, pairs)
    return 0


def audit(config: Config, source: AuditSource, weights: str, scratch: Path) -> list[LogProbDifference]:
    """Runs the engine, then the trainer (the engine has then freed its device), and compares their log-probs."""
    from slime.megatron_backend.step.replay import replay_log_probs

    masks = [s.loss_mask for s in source.samples]

    def row(values: Sequence[Tensor]) -> Tensor:
        return active(values, masks[: len(values)])

    engine = {}
    if config.rollout.rollout_temperature == 1.0:
        with PrefillEngine(config, weights, scratch) as server:
            engine[PREFILL] = row(server.log_probs(source.samples, side_by_side=True))
            engine[ALONE] = row(server.log_probs(source.samples[:MOST_ALONE], side_by_side=False))
    layouts = trainer_layouts(source.micro_batches)
    found = replay_log_probs(one_rank(config), weights, source.samples, layouts)
    trainer = {name: row(values) for name, values in found.items()}
    decode = row([torch.tensor(s.rollout_log_probs, dtype=torch.float32) for s in source.samples])
    return table_rows(trainer, engine, decode)


def table_rows(
    trainer: dict[str, Tensor], engine: dict[str, Tensor], decode: Tensor
) -> list[LogProbDifference]:
    """Returns the lines of the table. Without engine prefill (a temperature other than 1), lines that need it are left
    out."""
    mine = (TRAINING, trainer[TRAINING])
    pairs = [compare("what training sees", mine, (DECODE, decode))]
    if engine:
        prefill = (PREFILL, engine[PREFILL])
        pairs += [
            compare("its parts", mine, prefill),
            compare("its parts", prefill, (DECODE, decode)),
        ]
    layout = "the same program, another batch layout"
    pairs += [compare(layout, item, mine) for item in trainer.items() if item[0] != TRAINING]
    if engine:
        alone = engine[ALONE]
        pairs.append(compare(layout, (ALONE, alone), (PREFILL, engine[PREFILL][: alone.numel()])))
    return pairs


def trainer_layouts(rows: list[list[int]]) -> dict[str, list[list[int]]]:
    """Returns ways to pack the same samples.

    The ways are: as in training; each sample alone; reversed within its row; mixed with samples from other rows; and
    rows split in half. Mixed rows are drawn with a fixed seed and keep their lengths.
    """
    indices = [i for row in rows for i in row]
    random.Random(0).shuffle(indices)
    mixed, start = [], 0
    for row in rows:
        mixed.append(indices[start : start + len(row)])
        start += len(row)
    halves = [half for row in rows for half in (row[: len(row) // 2], row[len(row) // 2 :]) if half]
    return {
        TRAINING: rows,
        "trainer, each sample alone": [[i] for row in rows for i in row],
        "trainer, rows reordered": [row[::-1] for row in rows],
        "trainer, mixed over rows": mixed,
        "trainer, rows split in half": halves,
    }


def report(
    run_dir: Path, config: Config, source: AuditSource, weights: str, pairs: list[LogProbDifference]
) -> None:
    """Prints the table, and writes the JSON file and the picture."""
    left_out = ", ".join(f"{reason}: {n}" for reason, n in source.left_out.most_common())
    print(
        f"rollout {source.rollout_id}, weights version {source.version} ({weights}), {len(source.samples)} samples in "
        f"{len(source.micro_batches)} micro-batches, {config.megatron.params_dtype} on {config.cluster.device}"
    )
    if quantizes(config.engine.backend_args):
        print(f"the engine computed in {engine_dtype(config)}: the difference has its rounding")
    if left_out:
        print(f"not comparable, in no number below: {left_out} tokens")
    if config.rollout.rollout_temperature != 1.0:
        print(
            f"--rollout-temperature is {config.rollout.rollout_temperature:g}: vLLM's prompt log-probs are "
            "at 1 only, so "
            "engine prefill is left out"
        )
    if config.megatron.tensor_model_parallel_size > 1:
        print(
            f"the trainer ran on {config.megatron.tensor_model_parallel_size} tensor-parallel ranks, its replay on one"
        )
    print(table(pairs))
    folder = run_dir / "audit"
    folder.mkdir(exist_ok=True)
    path = folder / f"rollout_{source.rollout_id}.json"
    head = {"rollout_id": source.rollout_id, "weight_version": source.version, "weights": weights}
    head |= {
        "dtype": config.megatron.params_dtype,
        "engine_dtype": engine_dtype(config),
        "device": config.cluster.device,
        "not_comparable": dict(source.left_out),
    }
    path.write_text(json.dumps(as_json(pairs, **head), indent=2) + "\n", encoding="utf-8")
    title = f"rollout {source.rollout_id} of {run_dir.resolve().name}: {pairs[0].tokens:,} tokens"
    draw(pairs, title, path.with_suffix(".png"))
    print(f"written: {path} and {path.with_suffix('.png')}")
