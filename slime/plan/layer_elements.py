"""Elements, not bytes, of the activations that the layers of a trainer rank keep or make, per token of its micro-batch.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable

from slime.config import Config
from slime.models import Layer, read_decoder
from slime.models.decoder import Attention, choose_exchange
from slime.models.fused_attention import PADDED_ROWS, find_layer_obstacle
from slime.plan.model_shape import Shape
from slime.plan.rank_params import stage_layers
from slime.plan.stages import build_stages, micro_batch_group
from slime.plan.units import BYTES


def count_stored_layers(c: Config, shape: Shape, width: Callable[[Layer], float]) -> tuple[float, float]:
    """Returns two numbers for the pipeline rank that keeps the most: the number of (micro-batch, layer) pairs whose
    activations it keeps, and the mean of `width`, the elements per token that a layer keeps, over its layers."""
    stages = build_stages(c.megatron, shape.layers)
    group = micro_batch_group(c.megatron, shape.layers)
    found = [(0.0, 0.0)]
    for rank, layers in enumerate(stage_layers(c, shape)):
        if rank == stages.ranks - 1 and c.algorithm.enable_mtp_training:
            layers += shape.predictions
        if layers:
            mean = sum(map(width, layers)) / len(layers)
            found.append((len(layers) * stages.passes(rank, group) / stages.virtual, mean))
    return max(found, key=lambda pair: pair[0] * pair[1])


def layer_width(c: Config, shape: Shape, kind: Layer) -> float:
    """Returns the elements that a layer keeps per token of the micro-batch."""
    tp = c.megatron.tensor_model_parallel_size
    split = tp if c.megatron.sequence_parallel else 1
    full = c.megatron.overrides.get("recompute_granularity") == "full"
    keeps_outputs = full or c.megatron.overrides.get("transformer_impl") == "transformer_engine"
    kernel = (
        c.cluster.device == "cuda" and c.kernels.rlk_fast != "off" and "swiglu" in c.kernels.rl_kernel_ops
    )
    attention = kind.attention.kept + exchanged_elements(c, shape, kind.attention)
    attention = (attention + padded_elements(c, shape, kind)) / tp
    attention += rounded_inputs(c, shape, kind)
    post = 2 * shape.post_norms  # the inputs of the post-norms
    one = 2 if keeps_outputs else 1  # a norm's input, and its output
    if not kind.mlp:
        return one * shape.hidden / split + attention
    absent = one * (kind.kind == "none")
    narrow = 0 if shape.gated else (1 if full else 2 - kernel)
    if kind.sparse:
        shared = ((3 if full or not kernel else 2) - narrow) * shape.shared_ffn / tp
        # parallel branches also keep the router's input, both products' inputs and outputs, less the usual input
        norms = (4 if keeps_outputs else 3) + 4 * shape.parallel - absent
        widths = (4 if kernel else 5) if shape.gated else 3
        expert = shape.hidden + widths * shape.expert_ffn / c.megatron.expert_tensor_parallel
        return (norms + post) * shape.hidden / split + attention + shared + expert_copies(c, shape) * expert
    norms, mlp = (4, 3) if keeps_outputs else (2, 2 if kernel else 3)
    return (norms - absent + post) * shape.hidden / split + attention + (mlp - narrow) * shape.ffn / tp


def rounded_inputs(c: Config, shape: Shape, kind: Layer) -> float:
    """Returns the size of the dense products' rounded inputs, as a number of elements of the weights' dtype.

    The inputs are the norms' outputs (unless sequence parallelism gathers them again), attention's output (a quarter of
    the elements that attention keeps), and the output of the MLP's activation. Experts count 0, because their rounded
    inputs replace the larger inputs.
    """
    if not c.megatron.has_fp8_blocks:
        return 0.0
    tp, normed = c.megatron.tensor_model_parallel_size, 0 if c.megatron.sequence_parallel else shape.hidden
    found = normed + kind.attention.kept / 4 / tp
    found += shape.shared_ffn / tp if kind.sparse else normed + shape.ffn / tp
    return found * (1 + 4 / 128) / BYTES[c.megatron.params_dtype]


def exchanged_elements(c: Config, shape: Shape, attention: Attention) -> float:
    """Returns the elements that context parallelism adds to a layer's attention, over tensor-parallel ranks.

    Gathered: a rank keeps the keys and values that its two runs of a sequence see. That is on average the whole
    sequence and half a rank's share more. Exchanged: a rank keeps one more copy of its values and of its output, a
    quarter of what attention keeps, and each head of keys and values on all ranks that read it.
    """
    tp, cp = c.megatron.tensor_model_parallel_size, c.megatron.context_parallel_size
    if cp == 1 or not attention.context:
        return 0
    if choose_exchange(c.megatron.cp_comm_type, shape, tp, cp) == "all_gather":
        return attention.context * (cp + 0.5)
    repeats = max(cp / max(shape.groups // tp, 1), 1)
    return attention.kept / 4 + attention.context * (repeats - 1)


def padded_elements(c: Config, shape: Shape, kind: Layer) -> float:
    """Returns the elements that the copies of --attention-backend fused add to a layer's attention, over
    tensor-parallel ranks: the padded output, and the padding of queries, keys and values.

    The lengths of samples are unknown, so the padding is the most of long sequences. Sequences that need no padding
    have no copies.
    """
    own = c.megatron.overrides.get("transformer_impl") != "transformer_engine"
    fused = own and c.megatron.overrides.get("attention_backend") == "fused"
    if not fused or c.cluster.device != "cuda" or c.megatron.params_dtype == "float32" or not kind.softmax:
        return 0
    if find_layer_obstacle(read_decoder(shape.hf), kind) is not None:
        return 0
    return kind.attention.pair_flops / 4 + (PADDED_ROWS - 1) * kind.attention.kept / 2


def expert_copies(c: Config, shape: Shape) -> float:
    """Returns the number of (token, expert) pairs that a rank computes per token of its micro-batch, if the tokens
    spread evenly. If experts are not split, a rank sends its own part of the tokens to experts, as sequence parallelism
    split them."""
    return shape.topk * c.megatron.expert_tensor_parallel / c.megatron.tensor_model_parallel_size


def mlp_flight(shape: Shape, tokens: int, tp: int, split: int) -> float:
    """Returns the elements in the backward of an MLP: gradients of its first product's output and of the layer, and of
    a weight before it is added."""
    width = shape.first * shape.ffn / tp
    return tokens * (width + 2 * shape.hidden / split) + width * shape.hidden


def expert_flight(c: Config, shape: Shape, tokens: int) -> float:
    """Returns the elements at the peak of the backward of a layer's experts. The peak is either the gradients of the
    tokens' copies (their weighted halves are in float32), or fewer gradients and the stacked weights of the
    first product or their gradient."""
    first, copies, etp = shape.first, expert_copies(c, shape), c.megatron.expert_tensor_parallel
    width, split = (
        shape.expert_ffn / etp,
        c.megatron.tensor_model_parallel_size if c.megatron.sequence_parallel else 1,
    )
    weighted = copies * (2 * first * width + 2 * shape.hidden)
    product = copies * (first * width + shape.hidden)
    stack = shape.experts / c.megatron.expert_model_parallel_size * first * width * shape.hidden
    return tokens * 2 * shape.hidden / split + max(tokens * weighted, tokens * product + stack)
