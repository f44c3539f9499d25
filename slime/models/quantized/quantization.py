"""The record of a checkpoint's quantisation, and plain PyTorch that quantises and dequantises one weight by it.

Three kinds of `quantization_config` are known:

    fp8                  `weight` in float8_e4m3fn, and `weight_scale_inv` with one number per block of 128 x 128
                         (DeepSeek-V3, 2412.19437, part 3.3.2; Qwen3's FP8 checkpoints)
    compressed-tensors   float-quantized: `weight` in float8_e4m3fn, and `weight_scale` with one number per row or block
                         (GLM's FP8 checkpoints)
    compressed-tensors   pack-quantized: `weight_packed` with eight numbers of four bits per int32, `weight_scale` with
                         one number per group of a row, and `weight_shape` (Kimi-K2-Thinking)

Shapes: O outputs, I inputs of a weight. torch is imported only to compute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeGuard

from slime.models.decoder import Hf
from slime.models.quantized.int4 import BITS, PER_WORD, fit_groups, pack, round_groups, unpack
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from torch import Tensor, dtype

FP8_MOST = 448.0
"""Largest number of float8_e4m3fn."""
DITHERS = "dithers"
"""Key that this project adds to `quantization_config` in memory: reading spreads the weights over their rounding
intervals (slime.models.quantized.dither)."""
_NEVER = ("lm_head", "embed_tokens", "mlp.gate", "router", "block_sparse_moe.gate")
"""Ends of the names of modules that no scheme quantises: their layers are no plain linear layers in vLLM."""
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
}
"""Last part of a module's name -> last part of the name of vLLM's layer that fuses the module with others. Lists of
config.json may name either."""


@dataclass(frozen=True)
class QuantizationScheme:
    """The form in which a checkpoint stores its quantised weights."""

    method: Literal["fp8", "compressed-tensors"]
    """`quant_method` in config.json."""
    kind: Literal["float8_e4m3fn", "int4"]
    """Values of a quantised weight."""
    block: tuple[int, int]
    """Rows and columns that share a scale. 0 is the whole axis."""
    scale_dtype: str
    """Usual dtype of scales, as torch names it. The checkpoint's files may have another."""
    power_of_two: bool = False
    """All scales are powers of two (`scale_fmt` is ue8m0)."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: names, or patterns that begin with "re:"."""
    targets: tuple[str, ...] = ("Linear",)
    """Modules that are quantised: "Linear" for all linear layers, names, or patterns that begin with "re:"."""
    dithers: bool = False
    """Reading spreads the weights over their rounding intervals."""

    @property
    def weight(self) -> str:
        """Returns the last part of the name of a quantised weight."""
        return "weight_packed" if self.kind == "int4" else "weight"

    @property
    def scale(self) -> str:
        """Returns the last part of the name of a weight's scales."""
        return "weight_scale_inv" if self.method == "fp8" else "weight_scale"

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the last parts of the names of all tensors of a quantised weight."""
        return (self.weight, self.scale, *(("weight_shape",) if self.kind == "int4" else ()))

    @property
    def title(self) -> str:
        """Returns a short text for messages, such as "fp8 in blocks of 128 x 128"."""
        rows, columns = self.block
        if self.kind == "int4":
            return f"int4 in groups of {columns}"
        return f"fp8 in blocks of {rows} x {columns}" if rows and columns else "fp8 with a scale per row"

    @property
    def bytes_per_weight(self) -> float:
        """Returns the bytes of a quantised value with its share of the scale. The share of a whole axis counts as 0."""
        rows, columns = self.block
        share = (4 if self.scale_dtype == "float32" else 2) / (rows * columns) if rows and columns else 0.0
        return (0.5 if self.kind == "int4" else 1.0) + share

    def converts(self, module: str) -> bool:
        """Returns True if the linear layer `module` (name without ".weight") is quantised according to config.json. The
        files decide where both differ: `quantized_names`."""
        names = (module, fused_name(module))
        if module.endswith(_NEVER) or any(
            _matches(x, name, self.method) for x in names for name in self.ignored
        ):
            return False
        return any(name == "Linear" or _matches(x, name, self.method) for x in names for name in self.targets)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape of the scales of a weight."""
        (rows, columns), (by_row, by_column) = shape, self.block
        return -(-rows // (by_row or rows)), -(-columns // (by_column or columns))


def fused_name(module: str) -> str:
    """Returns the name of vLLM's layer that fuses a module with others, or the module's name."""
    path, dot, last = module.rpartition(".")
    return f"{path}{dot}{FUSED.get(last, last)}"


def _matches(module: str, name: str, method: str) -> bool:
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    if method == "fp8":
        return module.startswith(f"{name}.") or module == name or module.endswith(f".{name}")
    return module == name


def read_scheme(hf: Hf) -> QuantizationScheme | None:
    """Returns the scheme of a config.json, or None for a checkpoint with plain weights. Raises FlagError for an
    unknown scheme."""
    said = hf.get("quantization_config")
    if not said:
        return None
    found = _read(said) if isinstance(said, dict) else None
    if found is None:
        kind = _kind(said) if isinstance(said, dict) else ""
        raise FlagError(
            "quantization_config in config.json",
            "be fp8 with a weight_block_size, or compressed-tensors with float-quantized or pack-quantized weights of "
            f"{BITS} bits in symmetric groups",
            kind or said,
            "use a checkpoint in bfloat16",
        )
    return replace(found, dithers=DITHERS in said)


def _kind(said: Hf) -> str:
    return " ".join(str(said[key]) for key in ("quant_method", "format") if said.get(key))


def _read(said: Hf) -> QuantizationScheme | None:
    if said.get("quant_method") == "fp8":
        return _read_fp8(said)
    if said.get("quant_method") == "compressed-tensors":
        return _read_compressed(said)
    return None


def _read_fp8(said: Hf) -> QuantizationScheme | None:
    block, activations = said.get("weight_block_size"), said.get("activation_scheme")
    if (
        said.get("fmt") not in (None, "e4m3", "float8_e4m3fn")
        or activations not in (None, "dynamic")
        or not _are_sizes(block, 2)
    ):
        return None
    ignored = _read_names(said, "ignored_layers") or _read_names(said, "modules_to_not_convert")
    power = said.get("scale_fmt") == "ue8m0"
    return QuantizationScheme("fp8", "float8_e4m3fn", (block[0], block[1]), "float32", power, ignored)


def _read_names(said: Hf, key: str) -> tuple[str, ...]:
    """Returns a list of modules. Raises ValueError for an entry that is neither a name nor a valid pattern."""
    names = said.get(key) or ()
    wrong = [name for name in names if not _is_name(name)] if isinstance(names, (list, tuple)) else [names]
    if not wrong:
        return tuple(names)
    raise FlagError(
        f"{key} of quantization_config in config.json",
        'be a list of names of modules, and of valid patterns that begin with "re:"',
        wrong[0],
        "correct the entry, or download config.json again",
    )


def _is_name(name: object) -> bool:
    try:
        return isinstance(name, str) and (not name.startswith("re:") or bool(re.compile(name[3:])))
    except re.error:
        return False


def _read_compressed(said: Hf) -> QuantizationScheme | None:
    groups = [group for group in (said.get("config_groups") or {}).values() if isinstance(group, dict)]
    weights = [group.get("weights") or {} for group in groups]
    if not weights or any(each != weights[0] for each in weights) or not weights[0].get("symmetric"):
        return None
    first, form = weights[0], said.get("format")
    block = _block(first)
    if block is None or first.get("actorder") == "group":
        return None
    what = first.get("num_bits"), first.get("type")
    if form == "pack-quantized" and what == (BITS, "int") and first.get("strategy") == "group":
        kind: Literal["int4", "float8_e4m3fn"] = "int4"
    elif form == "float-quantized" and what == (8, "float") and first.get("strategy") != "group":
        kind = "float8_e4m3fn"
    else:
        return None
    targets = tuple(name for group in groups for name in _read_names(group, "targets") or ("Linear",))
    return QuantizationScheme(
        *("compressed-tensors", kind, block, "bfloat16", False, _read_names(said, "ignore"), targets)
    )


def _block(weights: Hf) -> tuple[int, int] | None:
    strategy, size, shape = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy == "group" and _are_sizes([size], 1):
        return 1, int(size or 0)
    if strategy == "block" and _are_sizes(shape, 2):
        return shape[0], shape[1]
    return (1, 0) if strategy == "channel" else None


def _are_sizes(found: object, count: int) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(found, (list, tuple))
        and len(found) == count
        and all(type(size) is int and size > 0 for size in found)
    )


def quantized_names(names: set[str], scheme: QuantizationScheme) -> Iterator[str]:
    """Yields the names, such as "model.layers.0.mlp.up_proj.weight", of the weights that `names` has in quantised
    form."""
    for name in names:
        module, _, last = name.rpartition(".")
        if last == scheme.scale:
            yield f"{module}.weight"


def check_groups(shape: tuple[int, ...], scheme: QuantizationScheme, name: str) -> None:
    """Raises ValueError unless the weight `name` can be quantised: a matrix whose rows are whole groups of int4."""
    columns = scheme.block[1]
    if len(shape) != 2 or (scheme.kind == "int4" and (shape[1] % columns or shape[1] % PER_WORD)):
        raise ValueError(
            f"{name} must be a matrix whose rows are whole groups of {columns}, got shape {list(shape)}; leave the "
            "module out (`ignore` in quantization_config), or use a checkpoint with another group_size"
            if scheme.kind == "int4"
            else f"{name} must be a matrix to have scales, got shape {list(shape)}; leave the module out of the scheme"
        )


def quantize(
    weight: Tensor, scheme: QuantizationScheme, *, name: str = "weight", scale_dtype: str | None = None
) -> dict[str, Tensor]:
    """Returns the tensors of a weight [O, I] in the form of the checkpoint: last part of the name -> tensor.

    fp8: `scale = max|w| / 448` of each block. int4: `scale = (w q) / (q q)` of each group, where q are the codes for
    `max|w| / 7` or `max|w| / 8`, whichever has the smaller squared error. So a published checkpoint whose values were
    rounded to bfloat16 gets its codes and scales again. `scale_dtype` is the dtype of the checkpoint's scales, and
    defaults to that of the scheme.
    """
    import torch

    check_groups(tuple(weight.shape), scheme, name)
    kind: dtype = getattr(torch, scale_dtype or scheme.scale_dtype)
    if scheme.kind == "int4":
        codes, scales = fit_groups(weight, scheme.block[1], kind)
        shape = torch.tensor(weight.shape, dtype=torch.int64, device=weight.device)
        return {"weight_packed": pack(codes), "weight_scale": scales, "weight_shape": shape}
    scales = scales_from(block_maxima(weight, scheme), scheme).to(kind)
    return {"weight": to_fp8(weight, scales, scheme), scheme.scale: scales}


def dequantize(tensors: Mapping[str, Tensor], scheme: QuantizationScheme, *, name: str = "weight") -> Tensor:
    """Returns the weight in bfloat16. `tensors` has the last parts of names as `quantize` returns them. Raises
    ValueError for missing tensors, and for scales of another shape."""
    import torch

    for last in scheme.names:
        if last not in tensors:
            raise ValueError(
                f"a checkpoint in {scheme.title} must have {name.removesuffix('weight')}{last}, got none; download it "
                "again"
            )
    if scheme.kind == "int4":
        shape = tuple(tensors["weight_shape"].tolist())
        codes = unpack(tensors["weight_packed"], shape[1])
    else:
        codes = tensors["weight"].float()
        shape = tuple(codes.shape)
    scales = tensors[scheme.scale]
    check_scales(tuple(scales.shape), shape, scheme, name)
    weight: Tensor = (codes * spread(scales, _full(scheme, shape), shape)).to(torch.bfloat16)
    return weight


def rounded(
    weight: Tensor, scheme: QuantizationScheme, *, name: str = "weight", scale_dtype: str | None = None
) -> Tensor:
    """Returns `dequantize(quantize(weight))` of a scheme in int4, in the dtype of the weight. `scale_dtype` is as in
    `quantize`."""
    import torch

    check_groups(tuple(weight.shape), scheme, name)
    return round_groups(weight, scheme.block[1], getattr(torch, scale_dtype or scheme.scale_dtype))


def check_scales(
    found: tuple[int, ...], shape: tuple[int, ...], scheme: QuantizationScheme, name: str
) -> None:
    """Raises ValueError unless `found` is the shape of the scales of a weight of `shape`."""
    if found != scheme.grid(shape):
        rows, columns = scheme.block
        raise ValueError(
            f"{name.removesuffix('weight')}{scheme.scale} must have shape {list(scheme.grid(shape))} for {shape[0]} x "
            f"{shape[1]} in blocks of {rows or shape[0]} x {columns or shape[1]}, got {list(found)}; download the "
            "checkpoint again"
        )


def _full(scheme: QuantizationScheme, shape: tuple[int, ...]) -> tuple[int, int]:
    return scheme.block[0] or shape[0], scheme.block[1] or shape[1]


def spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Returns `scales[row // block[0], column // block[1]]` for each element of a weight of `shape`, in fp32."""
    rows = scales.float().repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def block_maxima(weight: Tensor, scheme: QuantizationScheme, first: tuple[int, int] = (0, 0)) -> Tensor:
    """Returns the largest absolute value of each block, in fp32. `first` is the position of a slice's first element in
    its block, because a slice may begin inside a block."""
    import torch

    rows, columns = _full(scheme, tuple(weight.shape))
    (top, left), (height, width) = first, weight.shape
    padding = (left, -(left + width) % columns, top, -(top + height) % rows)
    padded = torch.nn.functional.pad(weight.float().abs(), padding)
    largest: Tensor = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    return largest


def scales_from(maxima: Tensor, scheme: QuantizationScheme) -> Tensor:
    """Returns the scales of fp8 blocks from their largest values: those with which a trainer in fp8 computes."""
    from rl_kernel.fp8 import reference

    return reference.scales_from(maxima, scheme.power_of_two)


def to_fp8(
    weight: Tensor, scales: Tensor, scheme: QuantizationScheme, first: tuple[int, int] = (0, 0)
) -> Tensor:
    """Returns `weight / scale of its block` in float8_e4m3fn. `first` is as in `block_maxima`."""
    import torch

    (top, left), (height, width) = first, weight.shape
    each = spread(scales, _full(scheme, tuple(weight.shape)), (top + height, left + width))[top:, left:]
    return (weight.float() / each).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
