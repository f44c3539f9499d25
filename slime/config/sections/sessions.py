"""Flags of the sessions section: the address of sessions, and limits after which a conversation of an agent ends."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COUNT, COUNT_OR_ZERO, SECONDS


@dataclass(frozen=True)
class SessionsConfig:
    """Address and limits of sessions (`slime.sessions`). A session beyond a limit ends, and its sample is truncated."""

    session_host: str = flag(
        "127.0.0.1",
        "address on which sessions of agents answer, for sandboxes on other hosts or in containers; auto: the address "
        "of the interface that leads out",
    )
    session_max_turns: int = flag(100, "maximum number of answers in a session of an agent", range=COUNT)
    session_max_tokens: int | None = flag(
        None, "maximum number of tokens that the model writes in a session", range=COUNT
    )
    session_max_tool_calls: int | None = flag(
        None, "maximum number of tool calls in a session", range=COUNT_OR_ZERO
    )
    session_deadline_s: float = flag(
        3600.0, "maximum seconds of a session, its tools included", range=SECONDS
    )
