"""Writes a tiny Qwen3 checkpoint and two-digit addition data from a seed, for the first run.

    python scripts/make_tiny_model.py runs/tiny/data

writes to that folder base/, the checkpoint (qwen3-tiny of architectures.py: 1.2 M random fp32 parameters, fast
tokenizer, chat template), and the files of arithmetic.py. Three in ten of the lessons in sft.jsonl are wrong (--slips).
The first run's reward corrects the errors that the model learned from them.

The same seed gives the same bytes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arithmetic import PAIRS, write_data
from make_model import build_config, build_model, save_model, save_settings


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Qwen3 checkpoint and two-digit addition data.")
    parser.add_argument("folder", type=Path, help="output folder; files of an earlier call are replaced")
    parser.add_argument("--seed", type=int, default=0, help="decides every byte (default 0)")
    parser.add_argument(
        "--test", type=int, default=256, help=f"held-out prompts of the {PAIRS} (default 256)"
    )
    parser.add_argument(
        "--slips", type=float, default=0.3, help="share of wrong answers in sft.jsonl (default 0.3)"
    )
    args = parser.parse_args(argv)
    if not 0 < args.test < PAIRS:
        parser.error(f"--test must lie in (0, {PAIRS}), got {args.test}; the default is 256")
    if not 0 <= args.slips <= 1:
        parser.error(f"--slips must lie in [0, 1], got {args.slips}; the default is 0.3")

    base = args.folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    model = build_model(build_config("qwen3-tiny"), args.seed, "cpu")
    save_settings(model, base)
    save_model(model, base)
    write_data(args.folder, args.seed, args.test, args.slips)
    size = f"{model.num_parameters() / 1e6:.1f} M parameters"
    print(f"{args.folder}: {size}, {PAIRS - args.test} training and {args.test} test prompts")


if __name__ == "__main__":
    main()
