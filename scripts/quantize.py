"""Writes a copy of a checkpoint whose linear layers are quantised, as published checkpoints in FP8 and INT4 are.

    python scripts/quantize.py --scheme fp8 DIR OUT_DIR
    python scripts/quantize.py --scheme int4 --experts-only DIR OUT_DIR

DIR is a checkpoint with plain weights, for example from make_model.py. The scheme fp8 is that of DeepSeek-V3 and
Qwen3 (blocks of 128 x 128), and int4 is that of Kimi-K2-Thinking (compressed-tensors, groups of 32). Needs host memory
for one tensor and one file of 5 GiB.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from slime.checkpoints.hf_config import read_config_json
from slime.checkpoints.hf_files import Files, write_shards
from slime.models.quantized.quantization import QuantizationScheme, quantize, read_scheme

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
}
SCHEMES = {"fp8": FP8, "int4": INT4}
_PLAIN = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts?.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
"""Modules that Kimi-K2-Thinking leaves out: all except the routed experts."""


def quantization_config(scheme: str, *, experts_only: bool = False, routers: tuple[str, ...] = ()) -> Any:
    """Returns `quantization_config` of a scheme. `routers` are modules to leave out by their names."""
    ignored = [*(_PLAIN if experts_only else ("lm_head",)), *routers]
    return SCHEMES[scheme] | {"modules_to_not_convert" if scheme == "fp8" else "ignore": ignored}


def quantize_checkpoint(source: Path, out: Path, given: dict[str, Any]) -> None:
    """Writes the copy with `quantization_config` = `given`. Raises ValueError for a checkpoint that is quantised."""
    hf = read_config_json(source)
    if hf.get("quantization_config"):
        raise ValueError(
            f"DIR must hold plain weights, got quantised weights in {source}; dequantise it first"
        )
    scheme = read_scheme({"quantization_config": given})
    assert scheme is not None
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".index.json")):
            shutil.copyfile(file, out / file.name)
    write_shards(_tensors(Files(source), scheme), out, 5 * 2**30)
    written = hf | {"quantization_config": named(given, source)}
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def named(given: dict[str, Any], source: Path) -> dict[str, Any]:
    """Returns the configuration with names instead of patterns, if its method is fp8. Engines read no patterns there,
    and published checkpoints list names."""
    if "modules_to_not_convert" not in given:
        return given
    names = [name.removesuffix(".weight") for name in Files(source).names() if name.endswith(".weight")]
    ignored: set[str] = set()
    for entry in given["modules_to_not_convert"]:
        pattern = entry.removeprefix("re:")
        ignored |= {entry} if pattern == entry else {name for name in names if re.match(pattern, name)}
    return given | {"modules_to_not_convert": sorted(ignored)}


def _tensors(files: Files, scheme: QuantizationScheme) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(files.names()):
        stored = files.get(name)
        module, _, last = name.rpartition(".")
        if last != "weight" or len(stored.shape) != 2 or not scheme.converts(module):
            yield name, stored[...]
            continue
        for part, tensor in quantize(stored[...], scheme, name=name).items():
            yield f"{module}.{part}", tensor


def find_routers(source: Path) -> tuple[str, ...]:
    """Returns the modules of routers, which published FP8 checkpoints of Qwen3 name."""
    names = (name.removesuffix(".weight") for name in Files(source).names())
    return tuple(sorted(name for name in names if name.endswith(".mlp.gate")))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint in FP8 or INT4.")
    parser.add_argument("source", type=Path, metavar="DIR")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="a new folder")
    parser.add_argument("--scheme", choices=sorted(SCHEMES), required=True)
    parser.add_argument("--experts-only", action="store_true", help="quantise only routed experts")
    args = parser.parse_args(argv)
    given = quantization_config(
        args.scheme, experts_only=args.experts_only, routers=find_routers(args.source)
    )
    quantize_checkpoint(args.source, args.out, given)


if __name__ == "__main__":
    main()
