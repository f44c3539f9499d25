"""The record of a model family: its reader of config.json, and the table of its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from slime.models.decoder import Decoder, Hf
from slime.models.layouts import Row
from slime.models.quantized.quantization import QuantizationScheme, read_scheme
from slime.models.quantized.quantized_checkpoint import dequantized
from slime.models.renaming import Aliases, RenamedTensors, rename
from slime.models.slices import Tensors

if TYPE_CHECKING:
    from torch import Tensor


@cache
def _pattern(megatron: str) -> re.Pattern[str]:
    """Returns a pattern that matches the Megatron names of a row."""
    pattern = re.escape(megatron)
    for letter in "ieb":
        pattern = pattern.replace(re.escape(f"{{{letter}}}"), rf"(?P<{letter}>\d+)")
    return re.compile(pattern)


@dataclass(frozen=True)
class Written:
    """A tensor of the weight table in the form of the checkpoint's files."""

    name: str
    tensor: Tensor
    number: int | None = None
    """Index in a stack of `of` such tensors. None means that the tensor is not in a stack."""
    of: int = 1
    keeps_order: bool = False
    """Rows and columns keep their order, so a part of the tensor can be written alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the tensor in the files."""
        return (*(() if self.number is None else (self.of,)), *self.tensor.shape)


def as_held(name: str, tensor: Tensor, hf: Hf) -> Written:
    """Returns the tensor unchanged, for a family whose files have the same tensors as the weight table."""
    return Written(name, tensor)


def no_fields(hf: Hf) -> Mapping[str, object]:
    """Returns no fields."""
    return {}


def later_layers(hf: Hf) -> tuple[str, ...]:
    """Returns the usual name prefixes of multi-token prediction: the layers that follow the last decoder layer."""
    depth = hf["num_hidden_layers"]
    more = hf.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{number}." for number in range(depth, depth + more))


def depth(hf: Hf) -> int:
    """Returns the number of decoder layers. The layers of multi-token prediction follow them."""
    return int(hf["num_hidden_layers"])


@dataclass(frozen=True)
class Prediction:
    """The layers of multi-token prediction of a family that trains them (`Decoder.predictions`)."""

    rows: tuple[Row, ...]
    """Weight table of the layers. "{i}" in a name of the files is the number of the layer."""
    first: Callable[[Hf], int] = depth
    """Returns the number of the first such layer."""
    copies: tuple[tuple[str, str], ...] = ()
    """Tensors of the decoder that a checkpoint may repeat in every such layer: name in the layer -> name in the
    decoder."""


@dataclass(frozen=True)
class Family:
    """A model family."""

    model_type: str
    """`model_type` in config.json."""
    title: str
    """Title of the family in pages and tables."""
    models: str
    """Model sizes in pages and tables."""
    rows: tuple[Row, ...]
    """Weight table."""
    read: Callable[[Hf], Decoder]
    """Reads config.json into a `Decoder`. Raises ValueError for unsupported settings."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of fields that config.json may leave out, as in transformers' class of the configuration. The settings of
    a text model are at the top level."""
    derived: Callable[[Hf], Mapping[str, object]] = no_fields
    """Returns fields that follow from other fields of config.json, which may leave them out or have another number."""
    ignored: tuple[str, ...] = ()
    """HF names that may be in a checkpoint but that the model does not use."""
    predicted: Callable[[Hf], tuple[str, ...]] = later_layers
    """Returns the name prefixes of multi-token prediction. Loading skips these tensors and export copies them if the
    run does not train them."""
    prediction: Prediction | None = None
    """Layers of multi-token prediction. None for a family that cannot train them."""
    tower: tuple[Row, ...] = ()
    """Weight table of the vision tower (`Decoder.vision`), with "{b}" for the number of a block."""
    stored: Callable[[Tensors, Hf], Tensors] = dequantized
    """Converts tensors that the files store in another form, such as quantised."""
    scheme: Callable[[Hf], QuantizationScheme | None] = read_scheme
    """Returns the scheme in which engines keep the weights, and in which updates must bring them. None means plain
    weights. Raises ValueError for an unknown scheme."""
    written: Callable[[str, Tensor, Hf], Written] = as_held
    """Converts an exported tensor to the form of files that engines and transformers read. The tensors of rows without
    HF parts fill a stack. For a tensor-parallel shard, the function returns the shard of the same rank, cut along one
    axis, or its tensors have `keeps_order`."""
    aliases: Aliases = ()
    """Prefixes of tensors in some files -> prefixes in the weight table."""
    module_prefix: tuple[str, str] = ("", "")
    """Prefix of the decoder's tensors in files, and of its modules in transformers' model, if they differ. PEFT names
    adapters by modules."""
    flags: tuple[tuple[str, Callable[[Hf], object]], ...] = ()
    """MODEL_ARGS whose value only this family defines: name -> value for a config.json."""

    def open(self, files: Tensors, hf: Hf) -> Tensors:
        """Returns the tensors of a checkpoint as plain weights under the names of the weight table."""
        return self.renamed(self.stored(files, hf))

    def renamed(self, tensors: Tensors) -> Tensors:
        """Returns the tensors under the names of the weight table."""
        return RenamedTensors(tensors, self.aliases) if self.aliases else tensors

    def table_name(self, name: str) -> str:
        """Returns the name in the weight table of a tensor in files."""
        return rename(name, self.aliases)

    def find(self, parameter: str) -> tuple[Row, tuple[str, ...]]:
        """Returns the row of a Megatron parameter, and its HF names with the numbers filled in. Raises KeyError without
        a row."""
        for row in self.rows + self.tower + (self.prediction.rows if self.prediction else ()):
            if match := _pattern(row.megatron).fullmatch(parameter):
                return row, tuple(name.format(**match.groupdict()) for name in row.hf)
        raise KeyError(f"{parameter} has no row in the {self.model_type} table")

    def exported(self, tensors: Iterable[tuple[str, Tensor]], hf: Hf) -> Iterator[tuple[str, Tensor]]:
        """Converts whole tensors of the weight table to those of the files. Holds one layer's stacks at a time."""
        stacks: dict[str, Tensor] = {}
        missing: dict[str, int] = {}
        for name, tensor in tensors:
            made = self.written(name, tensor, hf)
            if made.number is None:
                yield made.name, made.tensor
                continue
            if made.name not in stacks:
                stacks[made.name], missing[made.name] = made.tensor.new_empty(made.shape), made.of
            stacks[made.name][made.number] = made.tensor
            missing[made.name] -= 1
            if not missing[made.name]:
                yield made.name, stacks.pop(made.name)

    def ignores(self, hf_name: str) -> bool:
        return any(
            re.fullmatch(re.escape(name).replace(re.escape("{i}"), r"\d+"), hf_name) for name in self.ignored
        )

    def prediction_names(self, names: Iterable[str], hf: Hf) -> list[str]:
        """Returns the tensor names in `names` that belong to multi-token prediction.

        A token's log-prob does not depend on these tensors. The trainer builds these layers only to train them, and an
        engine builds them only to speculate.
        """
        prefixes = self.predicted(hf)
        return [name for name in names if name.startswith(prefixes)]

    def tower_names(self, names: Iterable[str], hf: Hf) -> list[str]:
        """Returns the tensor names in `names` that belong to the vision tower. The trainer builds the tower only for
        runs with images."""
        vision = self.read(hf).vision if self.tower else None
        files = () if vision is None else vision.files
        return [name for name in names if self.table_name(name).startswith(files)] if files else []

    def first_prediction(self, hf: Hf) -> int:
        """Returns the number of the first layer of multi-token prediction in the names of files."""
        assert self.prediction is not None
        return self.prediction.first(hf)

    def prediction_copies(self, names: set[str], hf: Hf) -> dict[str, str]:
        """Returns the tensors in `names` that copy tensors of the decoder: name of the copy -> name in the decoder."""
        if self.prediction is None:
            return {}
        first = self.first_prediction(hf)
        return {
            copy.format(i=first + n): name
            for n in range(len(self.read(hf).predictions))
            for copy, name in self.prediction.copies
            if copy.format(i=first + n) in names
        }
