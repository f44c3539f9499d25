"""The limits that end a session, and the reasons that decide what its samples become."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.sections.sessions import SessionsConfig

DONE = "done"
NO_REQUEST = "no_request"
"""The agent ended without an answer, and no request with its key came."""
LIMITS = ("turns", "tokens", "tool_calls", "time", "context")
"""Reasons after which a sample is truncated, as one that reached its number of tokens."""
ABORTS = ("aborted", "deadline")
"""Reasons after which the whole group is drawn again or dropped, as without sessions."""


@dataclass(frozen=True)
class SessionLimits:
    """When a session ends. None for no limit."""

    turns: int | None = None
    tokens: int | None = None
    """Tokens that the model writes."""
    tool_calls: int | None = None
    seconds: float | None = None

    @property
    def too_late(self) -> str:
        """The reason that a session records when its time is over."""
        return f"the session may take {self.seconds:g} seconds, which have passed"

    @classmethod
    def of(cls, flags: SessionsConfig) -> SessionLimits:
        """Returns the limits of the --session flags."""
        return cls(
            flags.session_max_turns,
            flags.session_max_tokens,
            flags.session_max_tool_calls,
            flags.session_deadline_s,
        )
