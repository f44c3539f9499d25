"""Computes, from shapes, the bytes that a trainer rank sends to the engines in one update of the weights.

slime.megatron_backend.checkpoint.own_slices sends as this file computes. The module imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime.config import Config
from slime.models.lora import sends_adapters
from slime.plan.model_shape import Shape
from slime.plan.rank_params import stage_params
from slime.plan.units import BYTES, amount, count
from slime.weight_sync.registry import CHANNELS

_CHANGED = 0.01
"""Share of values that the plan assumes a delta to change."""
_POSITION_BYTES = 2
"""Bytes of the position of a changed value, for a delta with few changes (slime.weight_sync.delta.sparse)."""


def compute_update_bytes(c: Config, shape: Shape) -> tuple[float, str]:
    """Returns the bytes that a rank of the largest pipeline stage sends in an update of all weights, and their
    arithmetic. Ranks with the same shard share the work."""
    params, _, stage = stage_params(c, shape, c.algorithm.enable_mtp_training)
    tp, ep, etp = (
        c.megatron.tensor_model_parallel_size,
        c.megatron.expert_model_parallel_size,
        c.megatron.expert_tensor_parallel,
    )
    copies, size = c.data_parallel_size * c.megatron.context_parallel_size, BYTES[c.megatron.params_dtype]
    dense, experts = params.split + params.whole, params.experts
    how = f"{count(dense)}{stage} / TP {tp} / {copies} copies x {size} B"
    sent = dense / (tp * copies) * size
    if experts:
        of_experts = copies * tp // (ep * etp)
        how += f" + experts {count(experts)} / EP {ep} / ETP {etp} / {of_experts} copies x {size} B"
        sent += experts / (ep * etp * of_experts) * size
    return sent, how


def update_lines(c: Config, shape: Shape, link: tuple[str, float] | None) -> Iterator[str]:
    """Yields lines about the bytes and the time of an update, per rank, and the bottleneck. `link` has the name and the
    bytes per second of the connection between trainer and engines, or between the node and a shared folder. An unknown
    `link` is None. `c` is the configuration of the policy's group. Yields nothing if rank 0 sends all weights, and for
    shared GPUs."""
    channel = CHANNELS[c.weight_update.update_weight_transport]
    if not channel.sliced or not c.num_engines or sends_adapters(c):
        return
    sent, how = compute_update_bytes(c, shape)
    whole = shape.params * BYTES[c.megatron.params_dtype]
    yield f"a rank gives {amount(sent)} of {amount(whole)}: {how}"
    if c.weight_update.update_weight_mode == "delta":
        yield from _delta_lines(sent, whole, BYTES[c.megatron.params_dtype])
        return
    if channel.buckets:
        yield f"a worker of an engine takes in {amount(whole)}, and keeps its part"
    else:
        yield f"the file has {amount(whole)}; a worker of an engine reads its part of each matrix that is cut by rows"
    if link is None:
        yield "times need --gpu"
        return
    name, speed = link
    giving, taking = sent / speed, whole / speed
    if channel.buckets:
        yield (
            f"at least {taking:.3g} s at {speed / 1e9:g} GB/s ({name}), bounded by the engines: all weights cross the "
            f"link of each of their GPUs; a rank's own part needs {giving:.3g} s"
        )
    else:
        yield (
            f"at least {giving:.3g} s for a rank to write at {speed / 1e9:g} GB/s ({name}), if the folder is not on "
            "its host; bounded by the folder's file system, whose speed is not known"
        )


def _delta_lines(sent: float, whole: float, size: int) -> Iterator[str]:
    """Yields lines about a delta. `sent` and `whole` are the bytes of a rank's slices and of all weights. `size` is the
    number of bytes of a value."""
    yield (
        f"this is its part of the first update, which is a file; a rank then keeps {amount(sent)} in host memory, and "
        f"an engine's host {amount(whole)} on its disk"
    )
    of_value = _POSITION_BYTES + size
    share = _CHANGED * of_value / size
    yield (
        f"a delta that changes {_CHANGED:.0%} of the values has about {amount(sent * share)} of a rank and "
        f"{amount(whole * share)} of all before they are compressed: {count(sent / size)} values x {_CHANGED:.0%} x "
        f"({_POSITION_BYTES} B position + {size} B value); the share of changed values is not known"
    )
