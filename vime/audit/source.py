"""Reads the input of an audit: a saved rollout of a run, its comparable samples, and their weights.

Log-probs are compared only with the weights that sampled the tokens. This file owns that check.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from slime.checkpoints.checkpoint_dir import start_directory
from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.config.hook_calls import Hooks
from slime.data.tokenizer import tokenizer_fingerprint
from slime.data.train_data import make_rank_data
from slime.rollout.debug_data import load_with_facts
from slime.rollout.facts import first_difference, replay_template, sample_facts
from slime.types import Sample
from vime.pool.control import CHECKPOINT_VERSION
from vime.pool.engine_flags import engine_dtype
from vime.vllm.fp8 import quantizes


@dataclass(frozen=True)
class AuditSource:
    """Comparable samples, all drawn from weights `version`. `micro_batches` are the micro-batches of training.

    `left_out`: number of active tokens by reason (slime.rollout.facts.REASONS), for the samples in these micro-batches
    that are not comparable.
    """

    rollout_id: int
    version: int
    samples: list[Sample]
    micro_batches: list[list[int]]
    left_out: Counter[str]


def read_config(run_dir: Path) -> Config:
    """Returns the configuration that the run saved. Raises ValueError if the run saved none."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise ValueError(f"RUN_DIR must be a run directory of vime train, got no {path}; see --run-dir")
    return Config.from_dict(json.loads(path.read_text(encoding="utf-8")))


def saved_rollouts(run_dir: Path, config: Config) -> dict[int, str]:
    """Maps each rollout to the path template of its file, for rollouts that the run saved or loaded, or that a stopped
    audit saved."""
    audit_template = replay_template(config.with_values(run_dir=str(run_dir)))
    data_paths = (audit_template, config.debug.load_debug_rollout_data, config.debug.save_debug_rollout_data)
    templates = [template for template in data_paths if template is not None]
    found = {
        i: template
        for template in templates
        for i in range(config.data.num_rollout or 0)
        if Path(template.format(rollout_id=i)).is_file()
    }
    if not found:
        raise ValueError(
            f"RUN_DIR must have saved rollouts, got none at {' or '.join(templates)}; start a new run with a "
            "--run-dir DIR of its own and --save-debug-rollout-data DIR/rollouts/{rollout_id}.pt "
            "(--num-rollout 1 is enough)"
        )
    return dict(sorted(found.items()))


def read_source(run_dir: Path, config: Config, rollout_id: int | None, most: int) -> AuditSource:
    """Reads the first micro-batches of a saved rollout (None: the first one): at least two, until there are `most`
    samples.

    Raises ValueError if the rollout has no comparable sample.
    """
    checkpoint = config.rollout.hf_checkpoint
    saved = saved_rollouts(run_dir, config)
    rollout_id = min(saved) if rollout_id is None else rollout_id
    if rollout_id not in saved:
        raise ValueError(f"--rollout must be one of the saved {sorted(saved)}, got {rollout_id}")
    template = saved[rollout_id]
    replayed = template == config.debug.load_debug_rollout_data
    part = config.debug.load_debug_rollout_data_subsample if replayed else None
    groups, facts = load_with_facts(template, rollout_id, subsample=part)
    samples = [sample for group in groups for sample in group]
    versions = Counter(s.weight_versions[0] for s in samples if len(set(s.weight_versions)) == 1)
    version = versions.most_common(1)[0][0] if versions else rollout_id
    mine = {
        "weight_version": [version],
        "temperature": config.rollout.rollout_temperature,
        "top_p": 1.0,
        "top_k": -1,
        "sampling": {},
        # for a quantised engine, the audit measures the effect of its precision
        "dtype": engine_dtype(config)
        if quantizes(config.engine.backend_args)
        else config.megatron.params_dtype,
        "tokenizer": tokenizer_fingerprint(checkpoint),
    }
    chosen: list[Sample] = []
    rows: list[list[int]] = []
    left_out: Counter[str] = Counter()
    for row in micro_batches(config, samples):
        if len(chosen) >= most and len(rows) > 1:
            break
        indices = []
        for i in row:
            reason = first_difference(sample_facts(samples[i], facts), mine)
            if reason is not None:
                left_out[reason] += samples[i].effective_response_length
                continue
            indices.append(len(chosen))
            chosen.append(samples[i])
        if indices:
            rows.append(indices)
    if not chosen:
        reasons = ", ".join(f"{reason}: {n} tokens" for reason, n in left_out.most_common())
        raise ValueError(
            f"rollout {rollout_id} must have samples that can be compared, got none ({reasons}); docs/audit.md "
            "explains each reason"
        )
    return AuditSource(rollout_id, version, chosen, rows, left_out)


def micro_batches(config: Config, samples: list[Sample]) -> list[list[int]]:
    """Returns indices in `samples` for every micro-batch of every rank, as training packs them."""
    checkpoint = config.rollout.hf_checkpoint
    ranks = make_rank_data(
        config, Hooks(config), samples, config.data_parallel_size, read_hf_config(checkpoint)
    )
    return [[data["partition"][i] for i in row] for data in ranks for row in data["micro_batch_indices"]]


def find_weights(config: Config, version: int, scratch: Path) -> str:
    """Returns an HF directory with the weights after `version` rollouts. If needed, exports a checkpoint into
    `scratch`.

    Raises ValueError if these weights do not exist. The error names the flags to add to the run.
    """
    from slime.megatron_backend.checkpoint.export import export_checkpoint

    if version == CHECKPOINT_VERSION:  # a run without a trainer: the weights with which its engines start
        return str(config.rollout.hf_checkpoint)
    if version == 0:
        start = start_directory(config)
        if (Path(start) / "config.json").is_file():
            return start
        raise ValueError(
            f"version 0 of the weights must be a Hugging Face directory, got {start}; export it with vime export and "
            "give --weights"
        )
    if config.debug.load_debug_rollout_data:
        raise ValueError(
            f"version {version} of the weights must be that of the run that drew the rollouts, got another run's files "
            f"({config.debug.load_debug_rollout_data}); give --weights, or audit --rollout 0"
        )
    if config.checkpoint.save_hf:
        written = Path(config.checkpoint.save_hf.format(rollout_id=version - 1))
        if (written / "config.json").is_file():
            return str(written)
    for folder in (config.checkpoint.save, config.checkpoint.load):
        if folder and (Path(folder) / f"iter_{version - 1:07d}").is_dir():
            export_checkpoint(one_rank(config).with_values(load=folder), version - 1, scratch / "weights")
            return str(scratch / "weights")
    raise ValueError(
        f"version {version} of the weights (after rollout {version - 1}) must be at hand, got no checkpoint "
        f"{version - 1} in --save {config.checkpoint.save} and --save-hf {config.checkpoint.save_hf}; run "
        "again with --save-hf "
        "DIR/{rollout_id} and --save-interval 1, audit --rollout 0, or give --weights"
    )


def one_rank(config: Config) -> Config:
    """Returns the configuration of a single trainer rank with the whole model."""
    return config.with_values(
        actor_num_nodes=1,
        actor_num_gpus_per_node=1,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
    )
