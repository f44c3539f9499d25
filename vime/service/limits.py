"""What one tenant may use, and the refusals of requests beyond that."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class TenantLimits:
    """The limits of each tenant. The command's flags have the same names."""

    models_per_tenant: int = 4
    tokens_per_minute: int = 1_000_000
    queue_length: int = 512
    """Requests that wait or run."""
    open_requests: int = 1024
    """HTTP requests at the same time, including those that wait for results."""
    checkpoint_bytes: int = 20 * 2**30
    """Bytes of checkpoints on disk."""
    rank: int = 64
    tokens_per_sequence: int = 4096
    """Tokens of one sequence; for sampling, the prompt's and the response's."""
    samples_per_request: int = 64
    body_bytes: int = 16 * 2**20
    body_seconds: float = 60.0
    """Seconds within which a client must send the whole body."""


class Refusal(Exception):
    """An answer with an error status and one line, which the client shows. `retry_s` is the wait before a retry."""

    def __init__(self, status: int, message: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_s = status, retry_s


class TokenBudget:
    """Counts each tenant's tokens. The budget refills evenly over a minute, and a full minute may be used at once."""

    def __init__(self, per_minute: int) -> None:
        self._rate = per_minute / 60
        self._most = float(per_minute)
        self._left: dict[str, tuple[float, float]] = defaultdict(lambda: (self._most, time.monotonic()))

    def _current(self, tenant: str) -> float:
        left, at = self._left[tenant]
        return min(self._most, left + (time.monotonic() - at) * self._rate)

    def require_possible(self, tokens: int) -> None:
        """Raises Refusal for a request that can never be served."""
        if tokens > self._most:
            raise Refusal(
                400, f"a request must have at most {self._most:.0f} tokens, got {tokens}; send fewer datums"
            )

    def take(self, tenant: str, tokens: int) -> None:
        """Counts the tokens of a request. Raises Refusal if the budget is used up."""
        left = self._current(tenant)
        if left < tokens:
            wait_s = (tokens - left) / self._rate
            raise Refusal(
                429,
                f"tokens per minute must be at most {self._most:.0f}, got {tokens} more; retry in {wait_s:.0f} s",
                wait_s,
            )
        self.add(tenant, tokens)

    def add(self, tenant: str, tokens: int) -> None:
        """Counts tokens of accepted work, such as sampled ones. The budget may become negative."""
        self._left[tenant] = (self._current(tenant) - tokens, time.monotonic())
