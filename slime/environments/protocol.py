"""The interface of a connector, and the two records that a connector exchanges with the run.

Both records are plain JSON objects, because a connector runs in another process.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypedDict

from slime.types import Json, Message

Object: TypeAlias = "dict[str, Foreign]"
"""A JSON object, or fields of a config."""
Foreign: TypeAlias = Any
"""A value of another project, whose type is not known here."""


class PromptRow(TypedDict):
    """One task of an environment."""

    prompt: str | list[Message]
    """The first messages. The run logs them and counts their tokens, and the environment sends its own messages."""
    label: str | None
    task: Json
    """The value with which `Connector.run_episode` finds the task."""


class EpisodeResult(TypedDict):
    """The end of an episode."""

    reward: float
    metrics: dict[str, float]
    """Further numbers of the environment, such as the parts of its reward."""


class Connector(Protocol):
    """An environment of a hub. The class of each file in `slime.environments.connectors` has these methods."""

    def __init__(self, name: str, arguments: dict[str, Json]) -> None:
        """Loads the environment. Raises any exception if the hub has no such environment, or if an argument is
        wrong."""

    async def load_prompts(self, split: str | None, limit: int | None) -> list[PromptRow]:
        """Returns the first `limit` tasks of `split`, in an order that does not change. The defaults are the split for
        training, and all tasks."""

    async def run_episode(self, base_url: str, api_key: str, model: str, task: Json) -> EpisodeResult:
        """Runs one episode. The environment sends its requests to `base_url`, an API of OpenAI, with `api_key`. An
        exception ends this episode only."""

    async def close(self) -> None:
        """Ends the servers and connections of the environment."""
