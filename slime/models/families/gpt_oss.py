"""gpt-oss: experts with a clipped SwiGLU and biases, a sink per attention head, a window in every other layer.

Its files stack the experts of a layer in one tensor, whose gate and up columns alternate. In the published files, the
weights are in MXFP4 and are dequantised while they are read. In the weight table, every expert has its own tensors.

Shapes: E experts, H hidden, F width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from slime.models.decoder import Decoder, Experts, Hf
from slime.models.family import Family, Written
from slime.models.layouts import Direct, GateUpTensor, Row, cat
from slime.models.quantized.mxfp4 import dequantized
from slime.models.reading import alternating_windows, expert_count, need, only, read_decoder
from slime.models.rows import ATTENTION, ENDS, HF, IGNORED, MG, NORMS, OUTPUT_BIAS
from slime.models.slices import Stored, Tensors, Where

if TYPE_CHECKING:
    from torch import Tensor


def experts(hf: Hf) -> Experts:
    """Returns the experts. `intermediate_size` is the width of an expert."""
    need(hf, "num_experts_per_tok")
    return Experts(expert_count(hf), hf["num_experts_per_tok"], hf["intermediate_size"], biases=True)


def read(hf: Hf) -> Decoder:
    """Returns the decoder. Raises ValueError for another quantisation and for settings that differ from the published
    models, because vLLM does not read some of these settings."""
    only(hf, rms_norm_eps=1e-5, attention_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0, hidden_act="silu")
    kind = (hf.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if kind != "mxfp4":
        raise ValueError(
            f"quant_method in config.json must be mxfp4 or left out for gpt_oss, got {kind}; use the published "
            "checkpoint or one in bfloat16"
        )
    decoder = read_decoder(
        hf,
        qkv_bias=True,
        output_bias=True,
        activation="clipped_swiglu",
        windows=alternating_windows(hf, 2),
        experts=experts,
    )
    return replace(decoder, sinks=True)


_MG_EXPERT, _HF_EXPERT = MG + "mlp.experts.local_experts.{e}.", HF + "mlp.experts.{e}."

ROWS = (
    *(ENDS + NORMS + ATTENTION),
    OUTPUT_BIAS,
    Row(MG + "self_attention.core_attention.sinks", (HF + "self_attn.sinks",), Direct(axis=0)),
    Row(MG + "mlp.router.weight", (HF + "mlp.router.weight",)),
    Row(MG + "mlp.router.bias", (HF + "mlp.router.bias",)),
    Row(_MG_EXPERT + "linear_fc1.weight", (_HF_EXPERT + "gate_up_proj",), GateUpTensor()),
    Row(_MG_EXPERT + "linear_fc1.bias", (_HF_EXPERT + "gate_up_proj_bias",), GateUpTensor()),
    Row(_MG_EXPERT + "linear_fc2.weight", (_HF_EXPERT + "down_proj",), Direct(axis=1)),
    Row(_MG_EXPERT + "linear_fc2.bias", (_HF_EXPERT + "down_proj_bias",)),
)

_STACKED = re.compile(r"(.*\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)(_blocks|_scales)?")
_ONE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(.*)")


class OneByOne:
    """The tensors of a checkpoint, with every expert's tensors under its number: `experts.3.gate_up_proj` [2 F, H] with
    gate above up, `experts.3.down_proj` [H, F], and their biases."""

    def __init__(self, files: Tensors, hf: Hf) -> None:
        self.files, self.count = files, expert_count(hf)
        self.quantized = any(name.endswith("_blocks") for name in files.names())

    def names(self) -> set[str]:
        """Returns the names. A tensor in MXFP4 has one name here. Its scales must be in the files too, because `get`
        reads them."""
        found = set()
        for name in self.files.names():
            if stacked := _STACKED.fullmatch(name):
                found |= {f"{stacked[1]}.{e}.{stacked[2]}" for e in range(self.count)}
            else:
                found.add(name)
        return found

    def get(self, name: str) -> Stored:
        if not (one := _ONE.fullmatch(name)):
            return self.files.get(name)
        stacked, expert, fused = f"{one[1]}.{one[3]}", int(one[2]), "gate_up" in name
        if self.quantized and not name.endswith("_bias"):
            ends = "_blocks", "_scales"
            weight = dequantized(*(self.files.get(stacked + end)[expert] for end in ends))
            return weight.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if fused else weight
        return GptOssExpert(self.files.get(stacked), expert, fused)

    def find_file(self, name: str) -> str:
        stacked = _ONE.sub(r"\1.\3", name)
        return self.files.find_file(stacked if stacked in self.files.names() else stacked + "_blocks")


@dataclass(frozen=True)
class GptOssExpert:
    """One expert, [outputs, inputs] or [outputs], in a stack [E, inputs, outputs] or [E, outputs]."""

    stack: Stored
    expert: int
    fused: bool
    """Gate and up alternate in the stack, and gate is above up here."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(reversed(self.stack.shape[1:]))

    def __getitem__(self, where: Where) -> Tensor:
        """Returns the part at `where`, which is `...` or a slice per axis, from the first axis on."""
        slices = () if where is ... else cast("tuple[slice, ...]", where)
        rows, *rest = [*slices, *[slice(None)] * (len(self.shape) - len(slices))]
        start, end, _ = rows.indices(self.shape[0])
        if not self.fused:
            return _turned(self.stack[self.expert, *rest, start:end])
        half = self.shape[0] // 2
        found = [
            _turned(self.stack[self.expert, *rest, 2 * (first - skipped) + odd : 2 * (last - skipped) : 2])
            for odd, skipped in enumerate((0, half))
            if (first := max(start, skipped)) < (last := min(end, skipped + half))
        ]
        return found[0] if len(found) == 1 else cat(found)


def _turned(tensor: Tensor) -> Tensor:
    """Transposes [inputs, outputs] to [outputs, inputs]. A bias stays as it is."""
    return tensor.T if tensor.dim() == 2 else tensor


def stacked(name: str, tensor: Tensor, hf: Hf) -> Written:
    """Reverses `OneByOne` for transformers and vLLM: weights [E, inputs, outputs] and biases [E, outputs], with
    alternating gate and up columns."""
    if not (one := _ONE.fullmatch(name)):
        return Written(name, tensor)
    if "gate_up" in name:
        tensor = tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    return Written(f"{one[1]}.{one[3]}", _turned(tensor), int(one[2]), expert_count(hf))


_FLAGS: tuple[tuple[str, Callable[[Hf], object]], ...] = (
    ("disable_bias_linear", lambda hf: False),
    ("quick_geglu", lambda hf: True),
    ("use_rope_scaling", lambda hf: bool(hf.get("rope_scaling"))),  # YaRN
)

GPT_OSS = Family(
    "gpt_oss",
    "gpt-oss, experts",
    "20B, 120B",
    ROWS,
    read,
    ignored=IGNORED,
    stored=OneByOne,
    scheme=lambda hf: None,
    written=stacked,
    flags=_FLAGS,
)
