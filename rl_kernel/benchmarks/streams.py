"""The calls of the operators that move bytes, their inputs, and the fewest bytes each can do with.

Inputs read once, outputs written once; for a backward pass, the least that any split between saving and computing
again needs. So moving more bytes raises no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_kernel.benchmarks.problem import CLIP
from rl_kernel.benchmarks.timing import Step

CHECKED = 4096
MASKED = ("masked_sum", "masked_mean", "masked_whiten")


@dataclass(frozen=True)
class Sizes:
    """Elements of the element-wise operators, shape of the logits of `logp`, samples, bytes of the copy; of a layer its
    tokens, the width of its MLP, heads of the query and of the key, and their size."""

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
"""Of the layer: Qwen3-4B."""
CPU_SIZES = Sizes(2**12, 8, 512, 2**10, 2**20, 2**6, 96, (4, 2), 16)


@dataclass
class Stream:
    """One row: the call, its fewest bytes, tensors whose `.grad` it leaves, and (actual, truth) pairs to check.

    `against`: of a rival the name of our row. `repeats`: whether a later call sees the inputs of the first one.
    """

    name: str
    operator: str
    call: Callable[[], tuple[Tensor, ...]]
    moved_bytes: int
    leaves: list[Tensor] = field(default_factory=list)
    truth: Callable[[tuple[Tensor, ...]], Iterable[tuple[Tensor, Tensor]]] | None = None
    has_target: bool = True
    against: str | None = None
    repeats: bool = True

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def gradients(self) -> list[Tensor]:
        """Those a call left in memory of their own (an in-place backward writes them over the leaf)."""
        grads = [(leaf, leaf.grad) for leaf in self.leaves]
        return [grad for leaf, grad in grads if grad is not None and grad.data_ptr() != leaf.data_ptr()]


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _normal(device: torch.device, seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))


def _logp(device: torch.device, sizes: Sizes) -> list[Stream]:
    from rl_kernel import logp

    logits = _normal(device, 0, sizes.rows, sizes.columns).bfloat16().requires_grad_()
    targets = torch.randint(sizes.columns, (sizes.rows,), device=device)
    gain, entropy_gain = _normal(device, 1, sizes.rows), _normal(device, 2, sizes.rows)
    some = slice(0, 64)
    log_p = torch.log_softmax(logits.detach()[some].double(), -1)
    wanted = log_p.gather(1, targets[some, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    small = _bytes(targets, gain)

    def truth(outputs: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, Tensor]]:
        return [(out[some], want) for out, want in zip(outputs, wanted, strict=False)]

    def forward(with_entropy: bool) -> Step:
        def call() -> tuple[Tensor, ...]:
            with torch.no_grad():
                out = logp(logits, targets, return_entropy=with_entropy)
            return out if isinstance(out, tuple) else (out,)

        return call

    def both(leaf: Tensor, entropy: str, in_place: bool = False) -> Step:
        def call() -> tuple[Tensor, ...]:
            out = logp(leaf, targets, return_entropy=entropy != "none", inplace_backward=in_place)
            values = out if isinstance(out, tuple) else (out,)
            used = 2 if entropy == "gradient" else 1
            torch.autograd.backward(values[:used], [gain, entropy_gain][:used])
            return values

        return call

    one, three = _bytes(logits) + small, 3 * _bytes(logits) + small
    plain = "logp forward+backward"
    # The first call sees the logits; later ones see what the backward left, which takes as long.
    own = logits.detach().clone().requires_grad_()
    return [
        Stream("logp forward", "logp", forward(False), one, [], truth),
        Stream("logp forward +entropy", "logp", forward(True), one, [], truth),
        Stream(plain, "logp", both(logits, "none"), three, [logits], truth),
        Stream(f"{plain} +entropy", "logp", both(logits, "metric"), three, [logits], truth),
        Stream(f"{plain} +entropy grad", "logp", both(logits, "gradient"), three, [logits], truth),
        Stream(
            f"{plain} in place", "logp", both(own, "none", in_place=True), three, [own], truth, repeats=False
        ),
    ]


class _Tokens:
    """Per-token inputs of the policy-loss operators, [N] each."""

    def __init__(self, device: torch.device, elements: int) -> None:
        self.log_probs = (_normal(device, 0, elements) * 0.3 - 1).requires_grad_()
        self.entropy = (_normal(device, 1, elements).abs()).requires_grad_()
        self.old = self.log_probs.detach() + 0.1 * _normal(device, 2, elements)
        self.ref = self.log_probs.detach() + 0.1 * _normal(device, 3, elements)
        self.advantages, self.upstream = _normal(device, 4, elements), _normal(device, 5, elements)
        self.weights = _normal(device, 6, elements).abs()
        self.mask = _normal(device, 7, elements) > -1
        self.denominators = torch.full_like(self.old, float(elements))

    def first(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[:CHECKED].double()


def _ratio_kl(device: torch.device, sizes: Sizes) -> list[Stream]:
    from rl_kernel import ratio_kl

    tokens = _Tokens(device, sizes.elements)
    constants = tokens.old, tokens.ref, tokens.mask
    inputs = tokens.log_probs, *constants
    outputs = 2 * _bytes(tokens.old)
    # Saved: the derivative of the KL (that of the ratio is the ratio); read with the ratio and two upstream
    # gradients, one gradient written.
    backward = 6 * _bytes(tokens.old)

    def truth(out: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, Tensor]]:
        old, ref = tokens.first(tokens.old), tokens.first(tokens.ref)
        wide = ratio_kl(tokens.first(tokens.log_probs), old, ref, tokens.mask[:CHECKED], "k3")
        return [(part[:CHECKED], want) for part, want in zip(out, wide, strict=True)]

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return ratio_kl(tokens.log_probs, *constants, "k3")

    def both() -> tuple[Tensor, ...]:
        out = ratio_kl(tokens.log_probs, *constants, "k3")
        torch.autograd.backward(out, [tokens.upstream, tokens.upstream])
        return out

    return [
        Stream("ratio_kl forward", "ratio_kl", forward, _bytes(*inputs) + outputs, [], truth),
        Stream(
            "ratio_kl forward+backward",
            "ratio_kl",
            both,
            _bytes(*inputs) + outputs + backward,
            [tokens.log_probs],
            truth,
        ),
    ]


def _grpo_loss(device: torch.device, sizes: Sizes) -> list[Stream]:
    tokens = _Tokens(device, sizes.elements)
    every = {
        "tis_weights": tokens.weights,
        "ref_log_probs": tokens.ref,
        "entropy": tokens.entropy,
    }
    return [
        *_grpo_streams("grpo_loss", tokens, {}, float(sizes.elements)),
        *_grpo_streams("grpo_loss all terms", tokens, every, tokens.denominators),
    ]


def _grpo_streams(
    name: str, tokens: _Tokens, terms: dict[str, Tensor], denominators: Tensor | float
) -> list[Stream]:
    from rl_kernel import grpo_loss

    inputs = [tokens.log_probs, tokens.old, tokens.advantages, tokens.mask, *terms.values()]
    inputs += [denominators] if isinstance(denominators, Tensor) else []
    numbers: dict[str, Any] = dict(CLIP)
    if terms:
        numbers |= {"kl_coef": 0.1, "kl_type": "low_var_kl", "entropy_coef": 0.01, "eps_clip_c": 3.0}
    leaves = [tokens.log_probs, *([tokens.entropy] if terms else [])]

    def call(part: slice = slice(None), wide: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        def pick(tensor: Tensor) -> Tensor:
            return tensor.detach()[part].double() if wide else tensor

        old, gain, mask = pick(tokens.old), pick(tokens.advantages), tokens.mask[part]
        divisor = denominators[part] if isinstance(denominators, Tensor) else denominators
        options: dict[str, Any] = numbers | {key: pick(value) for key, value in terms.items()}
        return grpo_loss(pick(tokens.log_probs), old, gain, mask, divisor, **options)

    def truth(out: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, Tensor]]:
        wide = call(slice(0, CHECKED), wide=True)[1]
        return [(part[:CHECKED], want) for part, want in zip(out[1:], wide.values(), strict=True)]

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            loss, metrics = call()
        return loss, *metrics.values()

    def both() -> tuple[Tensor, ...]:
        loss, metrics = call()
        loss.backward()
        return loss, *metrics.values()

    metrics = 5 if terms else 4
    one = _bytes(*inputs) + metrics * _bytes(tokens.old)
    # The derivative in the log-probs is saved, read, scaled by the upstream gradient and written; that in the
    # entropy needs only mask and denominators.
    two = one + 3 * _bytes(tokens.old)
    if terms:
        two += _bytes(tokens.mask, tokens.denominators, tokens.entropy)
    return [
        Stream(f"{name} forward", "grpo_loss", forward, one, [], truth),
        Stream(f"{name} forward+backward", "grpo_loss", both, two, leaves, truth),
    ]


def _swiglu(device: torch.device, sizes: Sizes) -> list[Stream]:
    from rl_kernel import swiglu
    from rl_kernel.ops.swiglu.cases import formula

    x = _normal(device, 0, sizes.tokens, 2 * sizes.ffn).bfloat16().requires_grad_()
    upstream = _normal(device, 1, sizes.tokens, sizes.ffn).bfloat16()
    want = formula(x.detach()[:64])
    # The backward reads x and the upstream gradient, and writes a gradient like x.
    one, two = _bytes(x, upstream), 3 * _bytes(x) + 2 * _bytes(upstream)

    def truth(out: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, Tensor]]:
        return [(out[0][:64], want)]

    return _layer_streams("swiglu", "swiglu", lambda: swiglu(x), x, upstream, (one, two), truth)


def _rotary(device: torch.device, sizes: Sizes) -> list[Stream]:
    from rl_kernel import rotary
    from rl_kernel.ops.rotary.cases import formula

    size, (queries, keys) = sizes.head_size, sizes.heads
    row = _normal(device, 0, sizes.tokens, keys, (queries // keys + 2) * size).bfloat16()
    angles = torch.arange(sizes.tokens, device=device)[:, None, None] / 1e6 ** (
        torch.arange(0, size, 2, device=device) / size
    )
    cos, sin = angles.cos(), angles.sin()
    # The query comes out of its norm, contiguous; a key without a norm is a view of the fused row.
    query = _normal(device, 1, sizes.tokens, queries, size).bfloat16()
    rows = []
    for name, x in (("query", query), ("key in a row", row[..., -2 * size : -size])):
        leaf, upstream = x.detach().requires_grad_(), _normal(device, 2, *x.shape).bfloat16()
        want = formula(x[:64], cos[:64], sin[:64])
        moved = 2 * _bytes(x) + _bytes(cos, sin)

        def truth(out: tuple[Tensor, ...], want: Tensor = want) -> Iterable[tuple[Tensor, Tensor]]:
            return [(out[0][:64], want)]

        def call(leaf: Tensor = leaf) -> Tensor:
            return rotary(leaf, cos, sin)

        rows += _layer_streams(f"rotary {name}", "rotary", call, leaf, upstream, (moved, 2 * moved), truth)
    return rows


def _layer_streams(
    name: str,
    operator: str,
    call: Callable[[], Tensor],
    leaf: Tensor,
    upstream: Tensor,
    moved: tuple[int, int],
    truth: Callable[[tuple[Tensor, ...]], Iterable[tuple[Tensor, Tensor]]],
) -> list[Stream]:
    """Forward, and forward with backward, of an operator with one input and one output."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (call(),)

    def both() -> tuple[Tensor, ...]:
        out = call()
        out.backward(upstream)
        return (out,)

    return [
        Stream(f"{name} forward", operator, forward, moved[0], [], truth),
        Stream(f"{name} forward+backward", operator, both, moved[1], [leaf], truth),
    ]


def _masked(device: torch.device, sizes: Sizes) -> list[Stream]:
    import rl_kernel

    values = _normal(device, 0, sizes.elements)
    mask = _normal(device, 1, sizes.elements) > -1
    counted = values.double() * mask
    total, count = counted.sum(), mask.sum()
    mean = total / count
    variance = ((counted - mean * mask) ** 2).sum() / (count - 1)
    white = (counted[:CHECKED] - mean) * mask[:CHECKED] * (variance + 1e-8).rsqrt()
    once = _bytes(values, mask)
    # Whitening must know all values before it writes the first: two reads.
    plan = {
        "masked_sum": (once, total),
        "masked_mean": (once, mean),
        "masked_whiten": (2 * once + _bytes(values), white),
    }
    del counted

    def stream(name: str) -> Stream:
        moved, want = plan[name]
        operator = getattr(rl_kernel, name)

        def truth(out: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, Tensor]]:
            return [(out[0][:CHECKED] if out[0].ndim else out[0], want)]

        return Stream(name, name, lambda: (operator(values, mask),), moved, [], truth)

    return [stream(name) for name in MASKED]


def _group_advantage(device: torch.device, sizes: Sizes) -> list[Stream]:
    from rl_kernel import group_advantage

    rewards = _normal(device, 0, sizes.samples)
    groups = torch.arange(sizes.samples, device=device) // 8
    wide = rewards.double().view(-1, 8)
    want = ((wide - wide.mean(1, keepdim=True)) / (wide.std(1, keepdim=True) + 1e-6)).view(-1)
    moved = 2 * _bytes(rewards) + _bytes(groups)

    def call() -> tuple[Tensor, ...]:
        return (group_advantage(rewards, groups),)

    # Groups lie anywhere in the batch: this is a sort or a scatter, so the copy bandwidth is no target for it.
    return [
        Stream(
            "group_advantage",
            "group_advantage",
            call,
            moved,
            [],
            lambda out: [(out[0], want)],
            has_target=False,
        )
    ]


STREAMS: dict[str, Callable[[torch.device, Sizes], list[Stream]]] = {
    "logp": _logp,
    "ratio_kl": _ratio_kl,
    "grpo_loss": _grpo_loss,
    "swiglu": _swiglu,
    "rotary": _rotary,
    "masked": _masked,
    "group_advantage": _group_advantage,
}
