"""Qwen3-VL with experts: the decoder of Qwen3-MoE behind the vision tower of Qwen3-VL.

Published files hold the experts of a layer in two tensors, gate_up_proj [E, H, 2 F], with gate before up, and down_proj
[E, F, H]. vLLM reads this form. transformers writes [E, 2 F, H] and [E, H, F], and reads both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from slime.models.decoder import Decoder, Hf
from slime.models.families.qwen import qwen3
from slime.models.families.qwen.qwen3_vl import DEEP, TEXT, TOWER, read_tower, rope
from slime.models.family import Family, Written
from slime.models.layouts import Direct, GateUpTensor, Row
from slime.models.quantized.quantized_checkpoint import dequantized
from slime.models.reading import expert_count, only, read_decoder, softmax_experts
from slime.models.rows import HF, IGNORED, MG, under
from slime.models.slices import Stored, Tensors, Where

if TYPE_CHECKING:
    from torch import Tensor

_MG_EXPERT, _HF_EXPERT = MG + "mlp.experts.local_experts.{e}.", HF + "mlp.experts.{e}."
ROWS = (
    *qwen3.ROWS,
    Row(MG + "mlp.router.weight", (HF + "mlp.gate.weight",)),
    Row(_MG_EXPERT + "linear_fc1.weight", (_HF_EXPERT + "gate_up_proj",), GateUpTensor()),
    Row(_MG_EXPERT + "linear_fc2.weight", (_HF_EXPERT + "down_proj",), Direct(axis=1)),
)
_STACK = re.compile(r"(.*\.experts)\.((?:gate_up|down)_proj)")
_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def read(hf: Hf) -> Decoder:
    """Returns the decoder. transformers omits the setting that normalises the weights of a token's experts, because
    they are always normalised."""
    only(hf, use_sliding_window=False, attention_bias=False, norm_topk_prob=True)
    decoder = read_decoder({**hf, "norm_topk_prob": True}, qk_norm="head", rope=rope, experts=softmax_experts)
    return replace(decoder, vision=read_tower(hf, "qwen3_vl_moe"))


class ExpertTensors:
    """The tensors of a checkpoint, with every expert's tensors under its number: `experts.3.gate_up_proj` [2 F, H] and
    `experts.3.down_proj` [H, F]. `may_turn`: a stack may be [E, inputs, outputs]."""

    def __init__(self, files: Tensors, hf: Hf, *, may_turn: bool = True) -> None:
        self._files, self._count, self._may_turn = files, expert_count(hf), may_turn
        self._hidden, self._width = int(hf["hidden_size"]), int(hf["moe_intermediate_size"])

    def names(self) -> set[str]:
        found = set()
        for name in self._files.names():
            if stack := _STACK.fullmatch(name):
                found |= {f"{stack[1]}.{e}.{stack[2]}" for e in range(self._count)}
            else:
                found.add(name)
        return found

    def get(self, name: str) -> Stored:
        if not (one := _ONE.fullmatch(name)):
            return self._files.get(name)
        stack = self._files.get(f"{one[1]}.{one[3]}")
        fused = one[3] == "gate_up_proj"
        turned = (self._hidden, 2 * self._width) if fused else (self._width, self._hidden)
        is_turned = self._may_turn and tuple(stack.shape[1:]) == turned
        return StackedExpert(stack, int(one[2]), turned=is_turned)

    def find_file(self, name: str) -> str:
        return self._files.find_file(_ONE.sub(r"\1.\3", name))


@dataclass(frozen=True)
class StackedExpert:
    """One expert, [outputs, inputs], in a stack [E, outputs, inputs] or, if it is `turned`, [E, inputs, outputs]."""

    stack: Stored
    expert: int
    turned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = tuple(self.stack.shape[1:])
        return sizes[::-1] if self.turned else sizes

    def __getitem__(self, where: Where) -> Tensor:
        """Returns the part at `where`, which is `...` or a slice per axis, from the first axis on."""
        slices = () if where is ... else cast("tuple[slice, ...]", where)
        both = [*slices, *[slice(None)] * (2 - len(slices))]
        if not self.turned:
            return self.stack[self.expert, *both]
        return self.stack[self.expert, *reversed(both)].T


def stacked(name: str, tensor: Tensor, hf: Hf, *, turned: bool = True) -> Written:
    """Reverses `ExpertTensors` for stacks [E, inputs, outputs], or [E, outputs, inputs] if they are not `turned`."""
    if not (one := _ONE.fullmatch(name)):
        return Written(name, tensor)
    expert = tensor.T if turned else tensor
    return Written(f"{one[1]}.{one[3]}", expert, int(one[2]), expert_count(hf), keeps_order=True)


QWEN3_VL_MOE = Family(
    "qwen3_vl_moe",
    "Qwen3-VL, experts, images and videos",
    "30B-A3B, 235B-A22B",
    under(TEXT, ROWS),
    read,
    ignored=IGNORED,
    tower=TOWER + DEEP,
    stored=lambda tensors, hf: ExpertTensors(dequantized(tensors, hf), hf),
    written=stacked,
)
