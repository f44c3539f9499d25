"""Defines the limits that end a session, and the reasons that decide the status of its samples."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.sections.sessions import SessionsConfig

DONE = "done"
NO_REQUEST = "no_request"
"""The reason of a session whose agent ended without an answer and sent no request with the session's key."""
LIMITS = ("turns", "tokens", "tool_calls", "time", "context")
"""The reasons after which a sample is truncated, like a sample that reached its number of tokens."""
ABORTS = ("aborted", "deadline")
"""The reasons after which the whole group is drawn again or dropped, as without sessions."""


@dataclass(frozen=True)
class SessionLimits:
    """The limits of a session. None means no limit."""

    turns: int | None = None
    tokens: int | None = None
    """Number of tokens that the model generates."""
    tool_calls: int | None = None
    seconds: float | None = None

    @property
    def too_late(self) -> str:
        """The text that a session records when its time is over."""
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
