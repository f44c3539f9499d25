"""Qwen3.5 and Qwen3.6, dense and with experts: Qwen3-Next's layers with other projections in files.

Published checkpoints have a vision tower, which is that of Qwen3-VL without rows for the first decoder layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from slime.models.decoder import Decoder, Experts, Hf
from slime.models.families.qwen.qwen2_moe import SHARED_WITH_GATE
from slime.models.families.qwen.qwen2_moe import experts as shared_experts
from slime.models.families.qwen.qwen3_vl import FILES, TEXT, TOWER, read_tower
from slime.models.family import Family
from slime.models.hybrid import FLAGS, SHARED_WIDTH, hybrid_rows, read_hybrid
from slime.models.layouts import Row
from slime.models.quantized.quantized_checkpoint import dequantized
from slime.models.reading import expert_count, need, only
from slime.models.rows import EXPERTS, MLP, under
from slime.models.slices import Stored, Tensors, Where

if TYPE_CHECKING:
    from torch import Tensor


def experts(hf: Hf) -> Experts:
    """Returns the experts. The weights of a token's experts are always normalised, and newer files omit this
    setting."""
    only(hf, norm_topk_prob=True)
    return shared_experts({**SHARED_WIDTH, **hf, "norm_topk_prob": True})


def read(hf: Hf) -> Decoder:
    return text_model(hf, read_hybrid(hf))


def text_model(hf: Hf, decoder: Decoder) -> Decoder:
    """Returns the decoder with the state's dtype from config.json, which vLLM reads too."""
    return replace(decoder, state_dtype=hf.get("mamba_ssm_dtype") or "")


def width(hf: Hf) -> int | None:
    return hf.get("intermediate_size") or hf.get("moe_intermediate_size")


def read_moe(hf: Hf) -> Decoder:
    """Returns the decoder. No layer is dense, so files have only the width of an expert."""
    only(hf, mlp_only_layers=[], decoder_sparse_step=1)
    need(hf, "moe_intermediate_size")
    return text_model(hf, read_hybrid({**hf, "intermediate_size": width(hf)}, experts=experts))


def carried(hf: Hf) -> tuple[str, ...]:
    """Returns the prefix of the layers of multi-token prediction. These are not trained, and an export copies them."""
    return ("mtp.",)


class TextTensors:
    """The tensors of a checkpoint under the names of the weight table.

    Files name the text model `model.` or `model.language_model.`; `prefix` is the table's name. Some files hold the
    experts of a layer in two tensors, gate_up_proj [E, 2 F, H] and down_proj [E, H, F]; the table has one tensor per
    expert.
    """

    def __init__(self, tensors: Tensors, hf: Hf, prefix: str) -> None:
        self._tensors = tensors
        self._source: dict[str, tuple[str, int, str]] = {}
        for stored in tensors.names():
            name = stored
            if not stored.startswith((*carried(hf), FILES)):
                name = re.sub(r"^model\.(language_model\.)?", prefix, stored)
            layer, fused, projection = name.rpartition(".mlp.experts.")
            if not fused or projection not in ("gate_up_proj", "down_proj"):
                self._source[name] = (stored, -1, "")
                continue
            for expert in range(expert_count(hf)):
                for part in ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",):
                    self._source[f"{layer}{fused}{expert}.{part}.weight"] = (stored, expert, part)

    def names(self) -> set[str]:
        return set(self._source)

    def get(self, name: str) -> Stored:
        source, expert, part = self._source[name]
        stored = self._tensors.get(source)
        return stored if expert < 0 else Qwen35Expert(stored, expert, part)

    def find_file(self, name: str) -> str:
        return self._tensors.find_file(self._source[name][0])


@dataclass(frozen=True)
class Qwen35Expert:
    """The tensor of an expert and a projection in a stack of down [E, H, F], or of gate above up [E, 2 F, H]."""

    stack: Stored
    expert: int
    part: str

    @property
    def shape(self) -> tuple[int, int]:
        _, rows, columns = self.stack.shape
        return (rows if self.part == "down_proj" else rows // 2), columns

    def __getitem__(self, where: Where) -> Tensor:
        """Returns the part at `where`, which is `...` or a slice per axis, from the first axis on."""
        rows, *rest = (slice(None),) if where is ... else cast("tuple[slice, ...]", where)
        first = self.shape[0] if self.part == "up_proj" else 0
        start, end, _ = rows.indices(self.shape[0])
        return self.stack[self.expert, first + start : first + end, *rest]


def text_tensors(prefix: str) -> Callable[[Tensors, Hf], Tensors]:
    return lambda tensors, hf: TextTensors(dequantized(tensors, hf), hf, prefix)


COMMON = hybrid_rows(("qkv", "z", "b", "a"), ((0, 1, 2), (3,), (4,), (5,)))


def family(
    model_type: str, title: str, models: str, rows: tuple[Row, ...], prefix: str, tower: tuple[Row, ...] = ()
) -> Family:
    reader = read if rows is MLP else read_moe

    def read_with_tower(hf: Hf) -> Decoder:
        decoder = reader(hf)
        return replace(decoder, vision=read_tower(hf, model_type)) if hf.get("vision_config") else decoder

    return Family(
        model_type,
        title,
        models,
        under(prefix, COMMON + rows),
        read_with_tower if tower else reader,
        predicted=carried,
        stored=text_tensors(prefix),
        tower=tower,
        flags=(*FLAGS, ("ffn_hidden_size", width)),
    )


_DENSE, _MOE = "0.8B, 2B, 4B, 9B, 27B", "35B-A3B, 122B-A10B, 397B-A17B"
_SPARSE = EXPERTS + SHARED_WITH_GATE

QWEN3_5 = family("qwen3_5", "Qwen3.5 and 3.6, dense", _DENSE, MLP, TEXT, TOWER)
QWEN3_5_TEXT = family("qwen3_5_text", "Qwen3.5 and 3.6, dense, without vision tower", _DENSE, MLP, "model.")
QWEN3_5_MOE = family("qwen3_5_moe", "Qwen3.5 and 3.6, experts", _MOE, _SPARSE, TEXT, TOWER)
QWEN3_5_MOE_TEXT = family(
    "qwen3_5_moe_text", "Qwen3.5 and 3.6, experts, without vision tower", _MOE, _SPARSE, "model."
)
