"""Writes a copy of a quantised checkpoint with bfloat16 weights, for engines that receive weight updates.

    python scripts/dequantize.py DIR OUT_DIR

DIR is a published checkpoint, such as gpt-oss in MXFP4. OUT_DIR gets the same files, with config.json without
`quantization_config`. Needs disk for the model in bfloat16, and host memory for one layer and one file of 5 GiB.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from slime.checkpoints.hf_config import read_hf_config
from slime.checkpoints.hf_files import Files, write_shards
from slime.models import family_for


def dequantize_checkpoint(source: Path, out: Path) -> None:
    """Writes the copy. ValueError if the checkpoint is not quantised, or if no family reads its quantised files."""
    hf = read_hf_config(source)
    if not hf.get("quantization_config"):
        raise ValueError(
            f"DIR must hold a quantised checkpoint, got plain weights in {source}; use it as it is"
        )
    family = family_for(hf)
    tensors = family.stored(Files(source), hf)
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".index.json")):
            shutil.copyfile(file, out / file.name)
    (out / "config.json").unlink()
    whole = ((name, tensors.get(name)[...]) for name in sorted(tensors.names()))
    write_shards(family.exported(whole, hf), out, 5 * 2**30)
    plain = {key: value for key, value in hf.items() if key != "quantization_config"}
    (out / "config.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a quantised checkpoint in bfloat16.")
    parser.add_argument("source", type=Path, metavar="DIR")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="a new folder")
    args = parser.parse_args(argv)
    dequantize_checkpoint(args.source, args.out)


if __name__ == "__main__":
    main()
