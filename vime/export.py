"""`vime export`: a training checkpoint as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from vime.backends import parse_config


def main(argv: Sequence[str]) -> int:
    """Read --load and write --output-dir. ValueError if the checkpoint is missing or does not fit --hf-checkpoint."""
    parser = argparse.ArgumentParser(prog="vime export", allow_abbrev=False)
    parser.add_argument("--load", required=True, help="checkpoint directory (--save of the training run)")
    parser.add_argument("--hf-checkpoint", required=True, help="the checkpoint training started from")
    parser.add_argument("--output-dir", required=True, help="new Hugging Face directory")
    parser.add_argument("--iteration", "--ckpt-step", type=int, help="which checkpoint (default: the newest)")
    given = parser.parse_args(argv)
    # One rank without data or engines: the smallest complete configuration.
    step = () if given.iteration is None else ("--ckpt-step", str(given.iteration))
    config = parse_config(
        [
            *step,
            *("--load", given.load, "--hf-checkpoint", given.hf_checkpoint),
            *("--actor-num-gpus-per-node", "1", "--rollout-batch-size", "1", "--num-rollout", "1"),
            *("--debug-train-only", "--disable-rollout-global-dataset", "--loss-type", "sft_loss"),
        ]
    )
    with warnings.catch_warnings():
        # Megatron and torch warn about packages that are not installed and about their own deprecations.
        warnings.simplefilter("ignore")
        from slime.megatron_backend.export import export_checkpoint

        iteration = export_checkpoint(config, given.iteration, Path(given.output_dir))
    print(f"wrote checkpoint {iteration} of {given.load} to {given.output_dir}")
    return 0
