"""Checkpoints that are published in fp8 or int4. Their tensors are dequantised to bfloat16 while they are read, one by
one.

fp8: a weight in float8_e4m3fn, and `weight_scale_inv` with one number per block of 128 x 128 (DeepSeek-V3, 2412.19437,
part 3.3.2). int4: `weight_packed` with eight numbers per int32, `weight_scale` with one number per group of a row, and
`weight_shape`, as compressed-tensors writes them (Kimi-K2-Thinking).

Shapes: O outputs, I inputs of a weight. torch is imported only to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.models.decoder import Hf
from slime.models.family import Tensors
from slime.models.slices import Stored, Where

if TYPE_CHECKING:
    from torch import Tensor

_BITS = 4


def check_quantisation(hf: Hf) -> None:
    """Raises ValueError for a quantization_config that `dequantised` cannot read."""
    said = hf.get("quantization_config")
    if said and not (_is_fp8(said) or _is_int4(said)):
        kind = " ".join(str(said[key]) for key in ("quant_method", "format") if said.get(key))
        raise ValueError(
            "quantization_config in config.json must be fp8 with a weight_block_size, or compressed-tensors "
            f"pack-quantized with {_BITS} bits and symmetric groups, got {kind or said}; use a checkpoint in bfloat16"
        )


def _is_fp8(said: Hf) -> bool:
    return said.get("quant_method") == "fp8" and len(said.get("weight_block_size") or ()) == 2


def _is_int4(said: Hf) -> bool:
    groups = [group.get("weights") or {} for group in (said.get("config_groups") or {}).values()]
    return said.get("format") == "pack-quantized" and all(
        (weights.get("num_bits"), weights.get("type"), weights.get("symmetric"), weights.get("strategy"))
        == (_BITS, "int", True, "group")
        for weights in groups
    )


def dequantised(tensors: Tensors, hf: Hf) -> Tensors:
    """Returns the tensors of a checkpoint in the form of its weight table. This is a value of `Family.stored`."""
    said = hf.get("quantization_config")
    if not said:
        return tensors
    check_quantisation(hf)
    return BlockFp8(tensors, tuple(said["weight_block_size"])) if _is_fp8(said) else PackedInt4(tensors)


class BlockFp8:
    """The tensors of a checkpoint with blocks in fp8. A weight without scales is stored as it is."""

    def __init__(self, tensors: Tensors, block: tuple[int, int]) -> None:
        self._tensors, self._block, self._stored = tensors, block, tensors.names()

    def names(self) -> set[str]:
        return {name for name in self._stored if not name.endswith("_scale_inv")}

    def get(self, name: str) -> Stored:
        stored, scales = self._tensors.get(name), f"{name}_scale_inv"
        if scales in self._stored:
            return from_blocks(stored[...], self._tensors.get(scales)[...], self._block, name)
        return _Unscaled(stored, scales, self.place(name))

    def place(self, name: str) -> str:
        return self._tensors.place(name)


class _Unscaled:
    """A tensor without scales. It must be stored in more than one byte per element."""

    def __init__(self, stored: Stored, scales: str, place: str) -> None:
        self._stored, self._scales, self._place = stored, scales, place

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored.shape

    def __getitem__(self, where: Where) -> Tensor:
        found = self._stored[where]
        if found.element_size() == 1:
            raise ValueError(
                f"a checkpoint in fp8 must have {self._scales}, got none for {self._place}; download it again"
            )
        return found


def from_blocks(weight: Tensor, scales: Tensor, block: tuple[int, int], name: str) -> Tensor:
    """Returns `weight.float() * scales[row // block[0], column // block[1]]` in bfloat16: weight fp8 [O, I]."""
    import torch

    rows, columns = weight.shape
    wanted = [-(-rows // block[0]), -(-columns // block[1])]
    if list(scales.shape) != wanted:
        raise ValueError(
            f"{name}_scale_inv must have shape {wanted} for {rows} x {columns} in blocks of {block[0]} x {block[1]}, "
            f"got {list(scales.shape)}; download the checkpoint again"
        )
    return (weight.float() * spread(scales, block, weight.shape)).to(torch.bfloat16)


def spread(scales: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """Returns `scales[row // block[0], column // block[1]]` for each element of a weight of `shape`, in fp32."""
    rows = scales.float().repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


class PackedInt4:
    """The tensors of a checkpoint with packed int4 weights. Other tensors are stored as they are."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._stored = tensors, tensors.names()

    def names(self) -> set[str]:
        plain = {n for n in self._stored if not n.endswith(("_packed", "_scale", "_shape"))}
        return plain | {n.removesuffix("_packed") for n in self._stored if n.endswith("_packed")}

    def get(self, name: str) -> Stored:
        if f"{name}_packed" not in self._stored:
            return self._tensors.get(name)
        packed, scales, shape = (
            self._tensors.get(name + end)[...] for end in ("_packed", "_scale", "_shape")
        )
        return from_packed(packed, scales, shape.tolist())

    def place(self, name: str) -> str:
        return self._tensors.place(f"{name}_packed" if f"{name}_packed" in self._stored else name)


def from_packed(packed: Tensor, scales: Tensor, shape: list[int]) -> Tensor:
    """Returns `(code - 8) * scale of its group` in bfloat16. packed int32 [O, I / 8], the lowest four bits first;
    scales [O, groups]."""
    import torch

    columns = shape[1]
    shifts = torch.arange(0, 32, _BITS, dtype=torch.int32, device=packed.device)
    codes = (packed[..., None] >> shifts & 2**_BITS - 1).flatten(1)[:, :columns] - 2 ** (_BITS - 1)
    each = scales.float().repeat_interleave(columns // scales.shape[1], 1)
    weight: Tensor = (codes * each).to(torch.bfloat16)
    return weight
