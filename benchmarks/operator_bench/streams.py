"""The calls of the operators that move bytes, their inputs, and the minimum bytes of each call.

The minimum reads inputs once and writes outputs once. For a backward pass, it is the minimum over all choices between
saving and recomputation. Therefore an implementation that moves more bytes has no better figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

import rl_kernel
from operator_bench.problem import CLIP
from rl_kernel.ops.group_advantage import cases as group_advantage_cases
from rl_kernel.ops.grpo_loss import cases as grpo_loss_cases
from rl_kernel.ops.logp import cases as logp_cases
from rl_kernel.ops.masked import cases as masked_cases
from rl_kernel.ops.ratio_kl import cases as ratio_kl_cases
from rl_kernel.ops.rotary import cases as rotary_cases
from rl_kernel.ops.swiglu import cases as swiglu_cases

CHECKED, CHECKED_ROWS = 4096, 64
"""Numbers of elements and rows that are compared with the formula of the operator's cases."""
MASKED = ("masked_sum", "masked_mean", "masked_whiten")


@dataclass(frozen=True)
class Sizes:
    """Sizes: elements of the element-wise operators, shape of the logits of `logp`, samples, bytes of the copy. For a
    layer: tokens, width of the MLP, heads of query and key, and head size."""

    elements: int
    rows: int
    columns: int
    samples: int
    copy_bytes: int
    tokens: int
    ffn: int
    heads: tuple[int, int]
    head_size: int


GPU_SIZES = Sizes(2**26, 4096, 151936, 2**12, 2**30, 2**14, 9728, (32, 8), 128)
"""Sizes for a GPU. The layer has the sizes of Qwen3-4B."""
CPU_SIZES = Sizes(2**12, 8, 512, 2**10, 2**20, 2**6, 96, (4, 2), 16)


Outputs = tuple[Tensor, ...]
Truth = Callable[[Outputs], Iterable[tuple[Tensor, Tensor]]]
"""(outputs of a call) -> pairs (actual, float64 truth)."""


@dataclass
class Stream:
    """One row: the call, its minimum bytes, the tensors whose `.grad` it sets, and the true values of its results.

    `against` is the name of our row for a rival. `repeats` is true if later calls see the same inputs as the first
    call.
    """

    name: str
    operator: str
    call: Callable[[], Outputs]
    moved_bytes: int
    truth: Truth
    leaves: list[Tensor] = field(default_factory=list)
    against: str | None = None
    repeats: bool = True

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def gradients(self) -> list[Tensor]:
        """Returns the gradients in separate memory (an in-place backward writes them over the leaf)."""
        grads = [(leaf, leaf.grad) for leaf in self.leaves]
        return [grad for leaf, grad in grads if grad is not None and grad.data_ptr() != leaf.data_ptr()]


def _both_ways(
    name: str,
    operator: str,
    call: Callable[[], Outputs],
    upstream: Sequence[Tensor | None],
    leaves: list[Tensor],
    moved: tuple[int, int],
    truth: Truth,
) -> list[Stream]:
    """Returns a forward without gradients, and a forward with backward. `upstream` has gradients of the first
    outputs."""

    def forward() -> Outputs:
        with torch.no_grad():
            return call()

    return [
        Stream(f"{name} forward", operator, forward, moved[0], truth),
        Stream(f"{name} forward+backward", operator, _trained(call, upstream), moved[1], truth, leaves),
    ]


def _trained(call: Callable[[], Outputs], upstream: Sequence[Tensor | None]) -> Callable[[], Outputs]:
    def both() -> Outputs:
        out = call()
        torch.autograd.backward(out[: len(upstream)], cast(Sequence[Tensor], upstream))
        return out

    return both


def _first(wanted: Sequence[Tensor], count: int) -> Truth:
    """Returns a function that pairs the first `count` rows of each output with `wanted`; scalars stay whole."""

    def truth(out: Outputs) -> Iterable[tuple[Tensor, Tensor]]:
        return [(o[:count] if o.ndim else o, want) for o, want in zip(out, wanted, strict=False)]

    return truth


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _normal(device: torch.device, seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))


def _logp(device: torch.device, sizes: Sizes) -> list[Stream]:
    logits = _normal(device, 0, sizes.rows, sizes.columns).bfloat16().requires_grad_()
    targets = torch.randint(sizes.columns, (sizes.rows,), device=device)
    gain, entropy_gain = _normal(device, 1, sizes.rows), _normal(device, 2, sizes.rows)
    some = slice(0, CHECKED_ROWS)
    truth = _first(logp_cases.formula(logits.detach()[some], targets[some]), CHECKED_ROWS)
    small = _bytes(targets, gain)

    def call(leaf: Tensor, entropy: bool, in_place: bool = False) -> Callable[[], Outputs]:
        def step() -> Outputs:
            out = rl_kernel.logp(leaf, targets, return_entropy=entropy, inplace_backward=in_place)
            return out if isinstance(out, tuple) else (out,)

        return step

    one, three = _bytes(logits) + small, 3 * _bytes(logits) + small
    # The first call sees the logits. Later calls see the result of the backward, which takes the same time.
    own = logits.detach().clone().requires_grad_()
    plain = _both_ways("logp", "logp", call(logits, False), [gain], [logits], (one, three), truth)
    more = _both_ways("logp", "logp", call(logits, True), [gain], [logits], (one, three), truth)
    for row in more:
        row.name += " +entropy"
    both = "logp forward+backward"
    used = _trained(call(logits, True), [gain, entropy_gain])
    in_place = _trained(call(own, False, in_place=True), [gain])
    return [
        *(plain[0], more[0], plain[1], more[1]),
        Stream(f"{both} +entropy grad", "logp", used, three, truth, [logits]),
        Stream(f"{both} in place", "logp", in_place, three, truth, [own], repeats=False),
    ]


def _tokens(device: torch.device, elements: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the per-token inputs of the policy-loss operators, [N] each, and the part that is checked."""
    columns = grpo_loss_cases.GrpoLossCase("benchmark", elements).inputs(device=str(device))
    checked = {name: column[:CHECKED].clone() for name, column in columns.items()}
    for name in ("log_probs", "entropy"):
        columns[name].requires_grad_()
    return columns, checked


def _ratio_kl(device: torch.device, sizes: Sizes) -> list[Stream]:
    names = ("log_probs", "old_log_probs", "ref_log_probs", "mask")
    columns, checked = _tokens(device, sizes.elements)
    new, old, ref, mask = (columns[name] for name in names)
    some_new, some_old, some_ref, some_mask = (checked[name] for name in names)
    wanted = ratio_kl_cases.formula(some_new, some_old, some_ref, some_mask, "k3")
    upstream = _normal(device, 5, sizes.elements)
    one = _bytes(new, old, ref, mask) + 2 * _bytes(old)
    # Saved: the derivative of the KL (that of the ratio is the ratio); read with the ratio and two upstream
    # gradients, one gradient written.
    two = one + 6 * _bytes(old)

    def call() -> Outputs:
        return rl_kernel.ratio_kl(new, old, ref, mask, "k3")

    truth = _first(wanted, CHECKED)
    return _both_ways("ratio_kl", "ratio_kl", call, [upstream] * 2, [new], (one, two), truth)


def _grpo_loss(device: torch.device, sizes: Sizes) -> list[Stream]:
    tokens = _tokens(device, sizes.elements)
    numbers = {"kl_coef": 0.1, "kl_type": "low_var_kl", "entropy_coef": 0.01, "eps_clip_c": 3.0}
    return [*_grpo_streams("grpo_loss", *tokens, {}), *_grpo_streams("grpo_loss all terms", *tokens, numbers)]


def _grpo_streams(
    name: str, columns: dict[str, Tensor], checked: dict[str, Tensor], numbers: dict[str, Any]
) -> list[Stream]:
    """Returns the rows of grpo_loss. With `numbers`, the loss has all its terms, and a denominator per token."""
    new, old, gain, mask = (columns[key] for key in ("log_probs", "old_log_probs", "advantages", "mask"))
    terms, denominators = dict[str, Tensor](), float(len(new)) if not numbers else columns["denominators"]
    if numbers:
        terms = {key: columns[key] for key in ("tis_weights", "ref_log_probs", "entropy")}
    else:
        checked = {**checked, "tis_weights": torch.ones_like(checked["tis_weights"])}
    wanted = grpo_loss_cases.formula(checked, **CLIP, **numbers)[1]

    options: dict[str, Any] = {**CLIP, **numbers, **terms}
    names: list[str] = []

    def call() -> Outputs:
        loss, metrics = rl_kernel.grpo_loss(new, old, gain, mask, denominators, **options)
        names[:] = metrics
        return loss, *metrics.values()

    def truth(out: Outputs) -> Iterable[tuple[Tensor, Tensor]]:
        return [(part[:CHECKED], wanted[key]) for key, part in zip(names, out[1:], strict=True)]

    inputs = [new, old, gain, mask, *terms.values()]
    inputs += [denominators] if isinstance(denominators, Tensor) else []
    one = _bytes(*inputs) + (5 if terms else 4) * _bytes(old)
    # The derivative in the log-probs is saved, read, scaled by the upstream gradient and written. The derivative in
    # the entropy needs only mask and denominators.
    two = one + 3 * _bytes(old)
    if terms:
        two += _bytes(mask, columns["denominators"], columns["entropy"])
    leaves = [new, *([terms["entropy"]] if terms else [])]
    return _both_ways(name, "grpo_loss", call, [None], leaves, (one, two), truth)


def _swiglu(device: torch.device, sizes: Sizes) -> list[Stream]:
    x = _normal(device, 0, sizes.tokens, 2 * sizes.ffn).bfloat16().requires_grad_()
    upstream = _normal(device, 1, sizes.tokens, sizes.ffn).bfloat16()
    truth = _first([swiglu_cases.formula(x.detach()[:CHECKED_ROWS])], CHECKED_ROWS)
    # The backward reads x and the upstream gradient, and writes a gradient like x.
    moved = _bytes(x, upstream), 3 * _bytes(x) + 2 * _bytes(upstream)
    return _both_ways("swiglu", "swiglu", lambda: (rl_kernel.swiglu(x),), [upstream], [x], moved, truth)


def _rotary(device: torch.device, sizes: Sizes) -> list[Stream]:
    size, (queries, keys) = sizes.head_size, sizes.heads
    row = _normal(device, 0, sizes.tokens, keys, (queries // keys + 2) * size).bfloat16()
    angles = torch.arange(sizes.tokens, device=device)[:, None, None] / 1e6 ** (
        torch.arange(0, size, 2, device=device) / size
    )
    cos, sin = angles.cos(), angles.sin()
    # The query comes from its norm and is contiguous. A key without a norm is a view of the fused row.
    query = _normal(device, 1, sizes.tokens, queries, size).bfloat16()
    some, rows = slice(0, CHECKED_ROWS), []
    for name, x in (("query", query), ("key in a row", row[..., -2 * size : -size])):
        leaf, upstream = x.detach().requires_grad_(), _normal(device, 2, *x.shape).bfloat16()
        truth = _first([rotary_cases.formula(x[some], cos[some], sin[some])], CHECKED_ROWS)
        moved = 2 * _bytes(x) + _bytes(cos, sin)

        def call(leaf: Tensor = leaf) -> Outputs:
            return (rl_kernel.rotary(leaf, cos, sin),)

        rows += _both_ways(f"rotary {name}", "rotary", call, [upstream], [leaf], (moved, 2 * moved), truth)
    return rows


def _masked(device: torch.device, sizes: Sizes) -> list[Stream]:
    values = _normal(device, 0, sizes.elements)
    mask = _normal(device, 1, sizes.elements) > -1
    once = _bytes(values, mask)

    def stream(name: str) -> Stream:
        operator = getattr(rl_kernel, name)
        want = masked_cases.formula(name, values, mask)
        # Whitening needs all values before it writes the first value, so it reads them twice.
        moved = 2 * once + _bytes(values) if name == "masked_whiten" else once
        truth = _first([want[:CHECKED].clone() if want.ndim else want], CHECKED)
        return Stream(name, name, lambda: (operator(values, mask),), moved, truth)

    return [stream(name) for name in MASKED]


def _group_advantage(device: torch.device, sizes: Sizes) -> list[Stream]:
    rewards = _normal(device, 0, sizes.samples)
    groups = torch.arange(sizes.samples, device=device) // 8
    truth = _first([group_advantage_cases.formula(rewards, groups, None).to(device)], sizes.samples)
    moved = 2 * _bytes(rewards) + _bytes(groups)

    def call() -> Outputs:
        return (rl_kernel.group_advantage(rewards, groups),)

    return [Stream("group_advantage", "group_advantage", call, moved, truth)]


STREAMS: dict[str, Callable[[torch.device, Sizes], list[Stream]]] = {
    "logp": _logp,
    "ratio_kl": _ratio_kl,
    "grpo_loss": _grpo_loss,
    "swiglu": _swiglu,
    "rotary": _rotary,
    "masked": _masked,
    "group_advantage": _group_advantage,
}
