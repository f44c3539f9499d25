"""Reads checkpoints with quantised weights, and writes weights in the form of such a checkpoint.

Weights become bfloat16 while they are read. A rank reads and dequantises only the blocks that its own slices touch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.models.decoder import Hf
from slime.models.quantized.dither import dither
from slime.models.quantized.int4 import PER_WORD
from slime.models.quantized.quantization import (
    QuantizationScheme,
    check_scales,
    dequantize,
    quantize,
    quantized_names,
    read_scheme,
)
from slime.models.slices import Stored, Tensors, Where

if TYPE_CHECKING:
    from torch import Tensor, dtype

_PART = 2**19
"""Elements that a reader dequantises at a time, or more if a row of blocks has more. Each needs up to 60 bytes in
between."""


def dequantized(tensors: Tensors, hf: Hf) -> Tensors:
    """Returns the tensors of a checkpoint as plain weights. This is the usual value of `Family.stored`."""
    scheme = read_scheme(hf)
    return tensors if scheme is None else PlainWeights(tensors, scheme)


class PlainWeights:
    """The tensors of a quantised checkpoint as plain weights. A weight without scales is stored as it is."""

    def __init__(self, tensors: Tensors, scheme: QuantizationScheme) -> None:
        self._tensors, self._scheme, self._stored = tensors, scheme, tensors.names()

    def names(self) -> set[str]:
        return {self._plain(name) for name in self._stored} - {""}

    def get(self, name: str) -> Stored:
        if not (parts := self._parts(name)):
            return _Unscaled(
                self._tensors.get(name), self._part(name, self._scheme.scale), self.find_file(name)
            )
        if missing := [part for part in self._scheme.names if part not in parts]:
            raise ValueError(
                f"a checkpoint in {self._scheme.title} must have {self._part(name, missing[0])}, got none in "
                f"{self.find_file(name)}; download it again"
            )
        return _QuantizedTensor({part: self._tensors.get(parts[part]) for part in parts}, self._scheme, name)

    def find_file(self, name: str) -> str:
        stored = name if name in self._stored else self._part(name, self._scheme.weight)
        return self._tensors.find_file(stored)

    def _parts(self, name: str) -> dict[str, str]:
        """Returns the stored tensors of a quantised weight: last part of the name -> name. The result is empty for a
        plain tensor."""
        found = {part: self._part(name, part) for part in self._scheme.names if name.endswith(".weight")}
        found = {part: stored for part, stored in found.items() if stored in self._stored}
        return {} if found.keys() <= {"weight"} else found

    def _plain(self, stored: str) -> str:
        """Returns the name of the plain weight, or no text for a tensor that only accompanies a weight."""
        module, _, last = stored.rpartition(".")
        if last == self._scheme.weight:
            return f"{module}.weight"
        return "" if last in self._scheme.names else stored

    def _part(self, name: str, last: str) -> str:
        return f"{name.removesuffix('weight')}{last}"


class _Unscaled:
    """A tensor without scales. It must be stored in more than one byte per element."""

    def __init__(self, stored: Stored, scales: str, file: str) -> None:
        self._stored, self._scales, self._file = stored, scales, file

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored.shape

    def __getitem__(self, where: Where) -> Tensor:
        found = self._stored[where]
        if found.element_size() == 1 and found.is_floating_point():
            raise ValueError(
                f"a checkpoint in fp8 must have {self._scales}, got none for {self._file}; download it again"
            )
        return found


class _QuantizedTensor:
    """A quantised weight in a file (slime.models.slices.Stored). Indexing reads the blocks that the slice touches."""

    def __init__(self, parts: dict[str, Stored], scheme: QuantizationScheme, name: str) -> None:
        self._parts, self._scheme, self._name = parts, scheme, name
        weight = parts[scheme.weight]
        packed = scheme.kind == "int4"
        shape = parts["weight_shape"][...].tolist() if packed else weight.shape
        self.shape: tuple[int, ...] = tuple(shape)
        check_scales(tuple(parts[scheme.scale].shape), self.shape, scheme, name)
        if packed and tuple(weight.shape) != (shape[0], -(-shape[1] // PER_WORD)):
            raise ValueError(
                f"{name}_packed must have shape {[shape[0], -(-shape[1] // PER_WORD)]} for weight_shape {shape}, got "
                f"{list(weight.shape)}; download the checkpoint again"
            )

    def __getitem__(self, where: Where) -> Tensor:
        bounds = self._bounds(where)
        if bounds is None:
            return self._read((0, self.shape[0]), (0, self.shape[1]))[where]
        (top, bottom), (left, right) = bounds
        rows, columns = (
            (start // size * size, min(-(-end // size) * size, whole))
            for start, end, size, whole in zip(
                (top, left), (bottom, right), self._steps(), self.shape, strict=True
            )
        )
        found = self._read(rows, columns)
        return found[top - rows[0] : bottom - rows[0], left - columns[0] : right - columns[0]]

    def _bounds(self, where: Where) -> list[tuple[int, int]] | None:
        """Returns the first and the end index per axis, or None for an index that is no tuple of plain slices."""
        if where is Ellipsis:
            where = ()
        indices = where if isinstance(where, tuple) else (where,)
        found = []
        for axis, size in enumerate(self.shape):
            index = indices[axis] if axis < len(indices) else slice(None)
            if not isinstance(index, slice) or index.step not in (None, 1):
                return None
            found.append(index.indices(size)[:2])
        return found

    def _steps(self) -> tuple[int, int]:
        """Returns the rows and columns of a block, or the whole axis."""
        return tuple(size or whole for size, whole in zip(self._scheme.block, self.shape, strict=True))  # type: ignore[return-value]

    def _read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Returns the weight of whole blocks, in bfloat16."""
        import torch

        weight = torch.empty(rows[1] - rows[0], columns[1] - columns[0], dtype=torch.bfloat16)
        by_row, _ = self._steps()
        size = max(1, _PART // (by_row * weight.shape[1])) * by_row
        for part, first in zip(weight.split(size), range(*rows, size), strict=True):
            part.copy_(self._read_part((first, first + len(part)), columns))
        return weight

    def _read_part(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        import torch

        by_row, by_column = self._steps()
        scales = (
            slice(rows[0] // by_row, -(-rows[1] // by_row)),
            slice(columns[0] // by_column, -(-columns[1] // by_column)),
        )
        tensors = {self._scheme.scale: self._parts[self._scheme.scale][scales]}
        per = PER_WORD if self._scheme.kind == "int4" else 1
        across = slice(columns[0] // per, -(-columns[1] // per))
        tensors[self._scheme.weight] = self._parts[self._scheme.weight][slice(*rows), across]
        if per > 1:
            tensors["weight_shape"] = torch.tensor([rows[1] - rows[0], columns[1] - columns[0]])
        weight = dequantize(tensors, self._scheme, name=self._name)
        if not self._scheme.dithers:
            return weight
        kind, corner = tensors[self._scheme.scale].dtype, (rows[0], columns[0])
        return dither(weight, self._scheme, kind, self._name, corner, self.shape[1])


@dataclass(frozen=True)
class QuantizedWeights:
    """The weights that a checkpoint stores in quantised form. Updates of engines and written checkpoints have the same
    form."""

    scheme: QuantizationScheme
    names: frozenset[str]
    """HF names of the weights, such as "model.layers.0.mlp.up_proj.weight"."""
    scale_dtype: str

    @classmethod
    def from_files(cls, files: Tensors, scheme: QuantizationScheme) -> QuantizedWeights:
        """Reads the names of the tensors, and the dtype of one scale. Raises ValueError for a checkpoint without
        scales."""
        names = sorted(quantized_names(files.names(), scheme))
        if not names:
            raise ValueError(
                f"--hf-checkpoint must have tensors {scheme.scale} for {scheme.title}, got none; download the "
                "checkpoint again"
            )
        dtype = _read_dtype(files.get(f"{names[0].removesuffix('weight')}{scheme.scale}"))
        return cls(scheme, frozenset(names), str(dtype).removeprefix("torch."))

    def quantize(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Returns the tensors that store the whole weight `name`: name -> tensor. A plain weight is unchanged."""
        if name not in self.names:
            return {name: tensor}
        parts = quantize(tensor, self.scheme, name=name, scale_dtype=self.scale_dtype)
        return {f"{name.removesuffix('weight')}{last}": part for last, part in parts.items()}


class StoredForm:
    """The form in which a checkpoint stores its tensors: its quantised weights, and all dtypes. Making it opens every
    file of the checkpoint, so the files may be replaced afterwards."""

    def __init__(self, source: Tensors, scheme: QuantizationScheme | None) -> None:
        self._weights = None if scheme is None else QuantizedWeights.from_files(source, scheme)
        self._dtypes = {name: _read_dtype(source.get(name)) for name in source.names()}

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Returns the tensors that store the weight `name`, each with the dtype of the checkpoint's tensor. A tensor
        that the checkpoint lacks is returned unchanged."""
        parts = {name: tensor} if self._weights is None else self._weights.quantize(name, tensor)
        return {name: part.to(self._dtypes.get(name, part.dtype)) for name, part in parts.items()}


def _read_dtype(stored: Stored) -> dtype:
    return stored[0:0].dtype if stored.shape else stored[...].dtype
