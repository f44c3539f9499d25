"""Flags of the sessions section: environments, the address of sessions, and limits that end a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COUNT, COUNT_OR_ZERO, SECONDS


@dataclass(frozen=True)
class SessionsConfig:
    """Environments of other projects, and the address and limits of sessions (`slime.sessions`). A session beyond a
    limit ends, and its sample is truncated."""

    environment: list[str] | None = flag(  # noqa: RUF009
        None,
        "environment whose tasks are the prompts and whose rubric is the reward: verifiers:NAME, harbor:FOLDER, "
        "openenv:URL or nemo-gym:URL, with arguments ?name=value; NAME=verifiers:NAME ... mixes several",
    )
    environment_concurrency: int = flag(
        64, "maximum number of episodes of an environment at the same time", range=COUNT
    )
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
