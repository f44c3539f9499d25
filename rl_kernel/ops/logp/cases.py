"""Named shapes of `logp`, their inputs, and the formula in float64. CPU tests, GPU tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rl_kernel.kept import KeptTokens


@dataclass(frozen=True)
class LogpCase:
    """A shape: N tokens, V columns. Columns from `vocab_size` on are padding."""

    name: str
    tokens: int
    vocab: int
    vocab_size: int | None = None

    @property
    def real(self) -> int:
        """Returns the number of columns that are not padding."""
        return self.vocab if self.vocab_size is None else self.vocab_size

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Returns logits [N, V] of standard deviation 3 and targets [N] int64."""
        generator = torch.Generator(device).manual_seed(seed)
        logits = 3 * torch.randn(self.tokens, self.vocab, generator=generator, device=device)
        targets = torch.randint(self.real, (self.tokens,), generator=generator, device=device)
        return logits.to(dtype), targets

    def kept(self, targets: Tensor, most: int = 7, seed: int = 0) -> KeptTokens:
        """Returns kept ids. Every third token is not truncated. The other tokens keep their target and 0 to `most` ids,
        and some ids occur twice."""
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for token, target in enumerate(targets.tolist()):
            count = int(torch.randint(most + 1, (1,), generator=generator))
            ids = torch.randint(self.real, (count,), generator=generator).tolist()
            rows.append([] if token % 3 == 2 else [*ids, target, *ids[:1]])
        return KeptTokens.from_lists(rows, targets.device)


CASES = (
    LogpCase("no_tokens", 0, 16),
    LogpCase("one_token", 1, 16),
    LogpCase("one_column", 5, 1),
    LogpCase("tiny", 7, 11),
    LogpCase("padded", 9, 128, vocab_size=100),
    LogpCase("ragged_blocks", 4, 2 * 4096 + 700, vocab_size=2 * 4096 + 691),
    LogpCase("whole_blocks", 3, 2 * 4096, vocab_size=4096),
)
"""Cases that are small enough for Triton's interpreter."""

LARGE = (
    LogpCase("qwen3_half", 796, 75968),
    LogpCase("qwen3", 1000, 151936, vocab_size=151669),
    LogpCase("odd", 301, 50257),
)
"""Cases for a GPU."""


def formula(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    kept: KeptTokens | None = None,
    logit_cap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Computes the definition in float64: log-probs [N] over the kept columns and entropy [N] over all columns."""
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[:, None]
    logits = logits[:, :vocab_size].double()
    if logit_cap is not None:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    z = logit_scale * logits / temperature
    log_p = torch.log_softmax(z, -1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(-1)
    if kept is not None:
        ends = kept.offsets.tolist()
        lost = torch.zeros_like(z, dtype=torch.bool)
        for token, (first, stop) in enumerate(pairwise(ends)):
            if stop > first:
                lost[token] = True
                lost[token, kept.ids[first:stop].long()] = False
        log_p = torch.log_softmax(z.masked_fill(lost, -torch.inf), -1)
    return log_p.gather(1, targets.long()[:, None])[:, 0], entropy
