"""Named shapes of `linear_logp` and `logp` and their inputs, small enough for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """N tokens, H hidden, V columns of which those from `vocab_size` on are padding."""

    name: str
    tokens: int
    hidden: int
    vocab: int
    vocab_size: int | None = None

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [N, H] and weight [V, H] of `dtype`, logits of about unit variance; targets [N] int64."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(self.tokens, self.hidden, generator=generator)
        weight = torch.randn(self.vocab, self.hidden, generator=generator) / self.hidden**0.5
        real = self.vocab if self.vocab_size is None else self.vocab_size
        targets = torch.randint(real, (self.tokens,), generator=generator)
        return hidden.to(dtype), weight.to(dtype), targets


CASES = (
    Case("no_tokens", 0, 8, 16),
    Case("one_token", 1, 8, 16),
    Case("one_column", 5, 8, 1),
    Case("tiny", 7, 5, 11),
    Case("ragged", 1000, 67, 331),
    Case("padded_vocab", 130, 32, 128, vocab_size=100),
    Case("kept_tiles", 700, 16, 5000),
    Case("recomputed_tiles", 1100, 16, 5000, vocab_size=4999),
    Case("large_vocab", 3, 8, 151936),
)
