"""The state that an optimizer keeps per weight, and the memory that Muon's step adds.

Imports neither torch nor Megatron.
Mixed precision keeps fp32 main weights. Adam keeps two fp32 moments per weight. Muon keeps one for each matrix except
embedding and head, which stay on Adam. Norms and biases stay on Adam too, and are too small to count.
"""

from __future__ import annotations

from slime.config import Config
from slime.plan.model_shape import Shape
from slime.plan.rank_params import RankParams
from slime.plan.units import count

_ADAM, _MUON = 8, 4


def optimizer_state(c: Config, one: RankParams) -> tuple[float, str]:
    """Returns the bytes of the optimizer's state for parameters on a rank, before ranks share it, and its
    arithmetic."""
    main = main_bytes(c)
    if c.megatron.optimizer != "muon":
        return one.params * (main + _ADAM), f"{one.share} x {main + _ADAM} B{one.ranks}"
    how = f"{one.share} x {main + _MUON} B{one.ranks}"
    if one.ends:
        how += f" + {count(one.ends)} of embedding and head x {_ADAM - _MUON} B"
    return one.params * (main + _MUON) + one.ends * (_ADAM - _MUON), how


def main_bytes(c: Config) -> int:
    """Returns the bytes of a main weight. Float32 weights are their own main weights."""
    return 0 if c.megatron.params_dtype == "float32" else 2 if c.megatron.stores_remainders else 4


def saved_state(c: Config, shape: Shape, main: int = 4) -> float:
    """Returns the bytes of the optimizer's state of a whole model, with `main` bytes for a main weight."""
    if c.megatron.optimizer != "muon":
        return shape.params * float(main + _ADAM)
    ends = shape.params - shape.count_params(shape.kinds, 0).total
    return shape.params * (main + _MUON) + ends * float(_ADAM - _MUON)


def muon_step(c: Config, shape: Shape) -> tuple[float, str]:
    """Returns the bytes that Muon adds in a step, and their arithmetic. They are three fp32 copies of the largest
    matrix, and its parts if ranks gather the matrix. Products in fp32 add two squares."""
    tp, etp = c.megatron.tensor_model_parallel_size, c.megatron.expert_tensor_parallel
    found = [(shape.first * shape.expert_ffn, etp)] * any(kind.sparse for kind in shape.kinds)
    found += [(shape.first * shape.ffn, tp)] * any(kind.dense for kind in shape.kinds)
    whole = c.megatron.overrides.get("muon_tp_mode", "blockwise") != "blockwise"
    rows, ranks = max(found, key=lambda pair: pair[0] if whole else pair[0] / pair[1])
    outputs = rows if whole else rows / ranks
    each = 20 if whole and ranks > 1 else 12
    square = 0.0
    if c.megatron.overrides.get("muon_fp32_matmul_prec", "medium") != "medium":
        square = 8 * min(outputs, shape.hidden) ** 2
    how = f"{count(outputs * shape.hidden)} of the largest matrix x {each} B"
    return each * outputs * shape.hidden + square, how + (" and two squares" if square else "")
