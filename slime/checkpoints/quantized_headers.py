"""Checks from the headers of a quantised checkpoint's files that each quantised weight has its scales, in their shape.

Loading makes the same checks, tensor by tensor. This module makes them before a run starts anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime.models.quantized.int4 import BITS
from slime.models.quantized.quantization import (
    QuantizationScheme,
    check_groups,
    check_scales,
    quantized_names,
)
from slime.records.errors import FlagError

_FP8 = "F8_E4M3"
"""Dtype of float8_e4m3fn in a safetensors header."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file, as the header describes it."""

    shape: tuple[int, ...]
    dtype: str
    file: str


def check_quantized_headers(
    headers: Mapping[str, TensorHeader], scheme: QuantizationScheme, flag: str = "--hf-checkpoint"
) -> None:
    """Raises ValueError for the first quantised weight, in the order of names, whose tensors are incomplete or do not
    have the shapes of the scheme. Files without any quantised weight are an error too. `flag` names the checkpoint."""
    found = sorted(quantized_names(set(headers), scheme))
    bare = [name for name, header in headers.items() if header.dtype == _FP8 and name.endswith(".weight")]
    for name in sorted({*found, *bare, *_packed(headers, scheme)}):
        stem = name.removesuffix("weight")
        here = {last: headers[stem + last] for last in scheme.names if stem + last in headers}
        if missing := [stem + last for last in scheme.names if last not in here]:
            raise ValueError(
                f"a checkpoint in {scheme.title} must have {missing[0]}, got none for the weight in "
                f"{next(iter(here.values())).file}; download it again"
            )
        stored = here[scheme.weight].shape
        shape = (stored[0], stored[1] * 32 // BITS) if scheme.kind == "int4" and len(stored) == 2 else stored
        check_groups(shape, scheme, name)
        check_scales(here[scheme.scale].shape, shape, scheme, name)
    if headers and not found:
        raise FlagError(
            flag,
            f"hold weights in {scheme.title}, as quantization_config in its config.json says",
            f"no tensor with the name {scheme.scale}",
            "remove quantization_config if the weights are plain, or download the checkpoint again",
        )


def _packed(headers: Mapping[str, TensorHeader], scheme: QuantizationScheme) -> set[str]:
    """Returns the names of the weights whose packed values are in the files."""
    end = f".{scheme.weight}"
    if scheme.kind != "int4":
        return set()
    return {f"{name.removesuffix(end)}.weight" for name in headers if name.endswith(end)}
