"""Named shapes of the linear operators, their inputs, the formula in float64, and the rules that accept a result.

The tests on the host, the tests on a GPU and the benchmarks share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.logp import cases as logp_cases

Results = dict[str, Tensor]
"""Results by name: log_probs, entropy, and d_<input> for each input with a gradient."""
Operator = Callable[..., tuple[Tensor, Tensor]]
"""Maps (hidden=, weight=, bias=, targets=, ...) to (log_probs, entropy)."""


@dataclass(frozen=True)
class LinearCase:
    """A shape: N tokens, H hidden, V columns. Columns from `vocab_size` on are padding."""

    name: str
    tokens: int
    hidden: int
    vocab: int
    vocab_size: int | None = None

    @property
    def real(self) -> int:
        """Returns the number of columns that are not padding."""
        return self.vocab if self.vocab_size is None else self.vocab_size

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden [N, H] and weight [V, H] of `dtype`, with logits of about unit variance; targets [N] int64."""
        generator = torch.Generator(device).manual_seed(seed)
        hidden = torch.randn(self.tokens, self.hidden, generator=generator, device=device)
        weight = torch.randn(self.vocab, self.hidden, generator=generator, device=device) / self.hidden**0.5
        targets = torch.randint(self.real, (self.tokens,), generator=generator, device=device)
        return hidden.to(dtype), weight.to(dtype), targets

    def kept(self, targets: Tensor, most: int = 7) -> KeptTokens:
        """Returns kept ids, as `rl_kernel.ops.logp.cases.LogpCase.kept` makes them."""
        return logp_cases.LogpCase(self.name, self.tokens, self.vocab, self.vocab_size).kept(targets, most)


CASES = (
    LinearCase("no_tokens", 0, 8, 16),
    LinearCase("one_token", 1, 8, 16),
    LinearCase("one_column", 5, 8, 1),
    LinearCase("tiny", 7, 5, 11),
    LinearCase("ragged", 1000, 67, 331),
    LinearCase("padded_vocab", 130, 32, 128, vocab_size=100),
    LinearCase("kept_tiles", 700, 16, 5000),
    LinearCase("recomputed_tiles", 1100, 16, 5000, vocab_size=4999),
    LinearCase("large_vocab", 3, 8, 151936),
)
"""Cases for plain PyTorch on the host."""

TINY = (
    LinearCase("no_tokens", 0, 8, 16),
    LinearCase("one_token", 1, 8, 16),
    LinearCase("one_column", 5, 8, 1),
    LinearCase("odd_width", 9, 13, 37, vocab_size=33),
    LinearCase("one_block", 7, 24, 100),
    LinearCase("blocks", 130, 72, 300, vocab_size=290),
)
"""Cases that are small enough for Triton's interpreter. The exponential head can take all of these except
`odd_width`."""

LARGE = (
    LinearCase("qwen3_half", 796, 2048, 75968),
    LinearCase("qwen3", 1000, 1024, 151936, vocab_size=151669),
    LinearCase("odd_width", 301, 515, 50257),
)
"""Cases for a GPU."""


def formula(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    keep_mask: KeptTokens | None = None,
    logit_cap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Computes the definition in float64, with materialised logits: log-probs [N] and entropy [N]."""
    logits = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    return logp_cases.formula(logits, targets, temperature, vocab_size, keep_mask, logit_cap, logit_scale)


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes plain PyTorch in the dtype of the inputs: logits of that dtype, softmax in float32."""
    logits = F.linear(hidden, weight, bias)[:, :vocab_size].float()
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@cache
def upstream(tokens: int, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """Returns upstream gradients [N] of log-probs and entropy. They are cached, so that a captured or measured call
    copies nothing."""
    g, h = torch.randn(2, tokens, generator=torch.Generator().manual_seed(7)).to(device)
    return g, h


def evaluate(
    op: Operator, layer: Mapping[str, Tensor], targets: Tensor, uses: str = "both", **options: Any
) -> Results:
    """Returns the outputs of `op`, and its gradients in the tensors of `layer`. `uses` selects the outputs that have an
    upstream gradient ("log_probs", "entropy" or "both"). The other output has no upstream gradient, not even zeros."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in layer.items()}
    log_probs, entropy = op(**leaves, targets=targets, **options)
    g, h = upstream(len(targets), targets.device)
    used = [(log_probs, g)] * (uses != "entropy") + [(entropy, h)] * (uses != "log_probs")
    torch.autograd.backward([out for out, _ in used], [grad.to(out.dtype) for out, grad in used])
    results = {"log_probs": log_probs.detach(), "entropy": entropy.detach()}
    return results | {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def compute_truth(
    layer: Mapping[str, Tensor], targets: Tensor, uses: str = "both", **options: Any
) -> Results:
    """Returns outputs and gradients of the formula in float64."""
    wide = {name: tensor.double() for name, tensor in layer.items()}
    return evaluate(formula, wide, targets, uses, **options)


def contract_violations(
    actual: Results, truth: Results, dtype: torch.dtype, rounding: torch.dtype | None, allowance: float = 1.0
) -> list[str]:
    """Returns one line per result whose error exceeds the contract, for inputs of `dtype` and logits rounded to
    `rounding`. `allowance` multiplies the permitted error."""
    contract = CONTRACTS["linear_logp"]
    names = [str(kind).removeprefix("torch.") for kind in (dtype, rounding or torch.float32)]
    found = []
    for key, want in truth.items():
        bound = contract.outputs[names[1]].bound(want)
        if key.startswith("d_"):
            bound = max(contract.gradients[name].bound(want) for name in names)
        error = max_error(actual[key], want)
        if error > allowance * bound:
            found.append(f"{key} is off by {error:.2e}, permitted are {allowance * bound:.2e}")
    return found


PLAIN_FACTOR = 1.5
"""Permitted error as a multiple of the error of plain PyTorch in the same dtype: three roundings instead of two."""
PLAIN_SLACK = {torch.float32: 1e-6, torch.bfloat16: 2**-10, torch.float16: 2**-13}
"""Additional permitted error as a fraction of the result's size: a quarter of a unit roundoff; in float32, 1e-6, for
the exponentials."""
PLAIN_NATS = 1e-5
"""Additional permitted error in nats for log-probs and entropies. For an unlikely target, both are differences of
larger numbers."""


def acceptance_violations(
    samples: Iterable[tuple[Results, Results, Results]], dtype: torch.dtype
) -> list[str]:
    """Returns one line per result whose root-mean-square error exceeds the limit that plain PyTorch sets.

    `samples`: (actual, plain, truth). Small cases need several samples, because few numbers do not average a rounding.
    """
    sums: dict[str, list[float]] = {}
    for actual, same_dtype, truth in samples:
        for key, want in truth.items():
            wide = want.double()
            norms = [(x[key].double() - wide).square().sum().item() for x in (actual, same_dtype)]
            new = [*norms, wide.square().sum().item(), float(wide.numel())]
            sums[key] = [a + b for a, b in zip(sums.get(key, [0.0] * 4), new, strict=True)]
    found = []
    for key, (ours, theirs, size, count) in sums.items():
        gradient = key.startswith("d_")
        slack = PLAIN_SLACK[dtype if gradient else torch.float32] * size**0.5
        allowed = PLAIN_FACTOR * theirs**0.5 + slack + (1e-7 if gradient else PLAIN_NATS) * count**0.5
        if not ours**0.5 <= allowed:
            found.append(
                f"{key} has error {ours**0.5:.2e}, plain PyTorch {theirs**0.5:.2e}, allowed {allowed:.2e}"
            )
    return found
