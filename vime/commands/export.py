"""`vime export`: writes a checkpoint as a Hugging Face directory, as a torch_dist folder that slime and Megatron load,
or its adapters as a PEFT directory."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from slime.algo.losses import SFT_ROLLOUT
from slime.checkpoints.checkpoint_dir import require_no_model
from slime.config.sections.checkpoint import HfFormat
from vime.backends import parse_config


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the flags of `vime export`. Raises ValueError for flags that contradict each other."""
    parser = argparse.ArgumentParser(prog="vime export", allow_abbrev=False)
    parser.add_argument(
        "--load",
        help="checkpoint directory of a training run, or of slime's converter (default: --hf-checkpoint)",
    )
    parser.add_argument("--hf-checkpoint", required=True, help="the checkpoint training started from")
    parser.add_argument("--output-dir", required=True, help="new directory")
    parser.add_argument("--iteration", "--ckpt-step", type=int, help="which checkpoint (default: the newest)")
    parser.add_argument(
        "--to",
        choices=("hf", "torch_dist"),
        default="hf",
        help="what to write: a Hugging Face directory, or a torch_dist folder as slime's converter writes it",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a checkpoint of adapters, write whole weights in place of a PEFT directory",
    )
    parser.add_argument(
        "--format",
        choices=get_args(HfFormat),
        help="how a Hugging Face directory stores whole weights: in bfloat16, or as --hf-checkpoint does, in its "
        "quantisation and dtypes (default: in the trainer's dtype)",
    )
    options = parser.parse_args(argv)
    if options.load is None and (options.to == "hf" or options.iteration is not None):
        raise ValueError(
            "--load must be given unless --to torch_dist converts --hf-checkpoint, got none; name the folder of "
            "checkpoints"
        )
    if options.format is not None and options.to != "hf":
        raise ValueError(
            f"--format must be left out with --to {options.to}, got {options.format}; it is for --to hf"
        )
    return options


def main(argv: Sequence[str]) -> int:
    """Reads --load, or --hf-checkpoint, and writes --output-dir. Raises ValueError if the checkpoint is missing or does
    not fit --hf-checkpoint."""
    options = parse_options(argv)
    require_no_model("--output-dir", options.output_dir)
    # One rank without data or engines is the smallest complete configuration.
    step = () if options.iteration is None else ("--ckpt-step", str(options.iteration))
    load = () if options.load is None else ("--load", options.load)
    config = parse_config(
        [
            *step,
            *load,
            *("--hf-checkpoint", options.hf_checkpoint),
            *("--actor-num-gpus-per-node", "1", "--rollout-batch-size", "1", "--num-rollout", "1"),
            *("--debug-train-only", "--disable-rollout-global-dataset", "--loss-type", "sft_loss"),
            *("--rollout-function-path", SFT_ROLLOUT),
        ]
    )
    with warnings.catch_warnings():
        # Megatron and torch warn about packages that are not installed and about their own deprecations.
        warnings.simplefilter("ignore")
        from slime.megatron_backend.checkpoint.export import export_checkpoint

        out = Path(options.output_dir)
        read = export_checkpoint(
            config, options.iteration, out, options.to, merge=options.merge, form=options.format
        )
    print(f"wrote {read} to {options.output_dir}")
    return 0
