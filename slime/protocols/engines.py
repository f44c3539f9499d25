"""This module defines the interfaces of the rollout engine and the engine pool, and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from slime.types import SamplingParams

if TYPE_CHECKING:
    from slime.vision.inputs import ImageInputs

FinishReason = Literal["stop", "length", "abort"]
VERSIONS = "token_versions"
"""Engine column: the version of the weights that sampled each token, int32 [tokens]. Every answer may have it."""
UNKNOWN_VERSION = -2
"""Value in that column for a token that no engine sampled, or whose engine does not report it."""
KEPT_TOKENS = "kept_tokens"
"""Engine column: (the ids that top-p, top-k and min-p kept, int32; their number for each token, int32 [tokens]), where
a token that kept more ids than the request's argument has the number 0."""
TOP = "top_tokens"
"""Engine column: (ids, int32 [tokens, K]; log-probs in nats, float32 [tokens, K]) of the K likeliest ids of each token,
likeliest first. K is the request's argument."""
EXPERTS = "routed_experts"
"""Engine column: the experts of each token, an unsigned integer array [tokens, layers, experts of a token]. The rows
begin at the token of the request's argument, prompt included, and end before the last token, which is never computed.
"""
Arrays: TypeAlias = tuple[np.ndarray, ...]
"""The arrays of one engine column."""
OnTokens = Callable[[int, list[int], list[float]], None]
"""A function that gets the index of the first new token in the completion, the new token ids and their log-probs."""


@dataclass(frozen=True)
class GenerateResult:
    """A completion.

    Example::

        result = GenerateResult([5, 7], [-0.1, -0.3], " 4", "stop", weight_versions=[2])
        result.token_columns  # {"token_versions": [2, 2]}
    """

    token_ids: list[int]
    log_probs: list[float]
    """Log-probs in nats under the temperature-scaled distribution, one per token of `token_ids`."""
    text: str
    finish_reason: FinishReason
    weight_versions: list[int]
    """Versions of the weights that sampled the tokens, oldest first (a single entry for a single version)."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_ages: tuple[int, int] = (0, 0)
    """Ages of the cached tokens in weight updates, with --flush-cache-interval above 1: their sum and the largest."""
    queue_s: float | None = None
    """Seconds that the request waited in the engine before its first computation. None if the engine does not report
    it."""
    preemptions: int = 0
    """Number of times that the engine freed the request's memory for another request and recomputed it. 0 if the engine
    does not report it."""
    decode_tokens_per_s: float | None = None
    """Tokens per second after the first token. None if the engine does not report it."""
    columns: Mapping[str, Arrays] = field(default_factory=dict, compare=False)
    """The engine columns of this answer by their names: those of the request, `VERSIONS`, and others with one number
    per token of `token_ids`."""
    speculation: tuple[int, int, int] | None = None
    """Numbers of passes that checked a draft, drafted tokens and accepted tokens. None if not reported."""

    @property
    def token_columns(self) -> dict[str, list[float]]:
        """Returns the columns with one number per token, as lists. They include `VERSIONS` if each token's version is
        known."""
        plain = {name: arrays[0] for name, arrays in self.columns.items() if len(arrays) == 1}
        found = {name: array.tolist() for name, array in plain.items() if array.ndim == 1}
        if VERSIONS not in found and len(self.weight_versions) == 1:
            found[VERSIONS] = self.weight_versions * len(self.token_ids)
        return found


@dataclass(frozen=True)
class AnswerParts:
    """A request for the tokens of a completion that is not finished."""

    every_s: float
    """Seconds between two parts."""
    take: Callable[[int, GenerateResult], None]
    """A function that gets the index of the first new token in the completion, and the new tokens with their log-probs,
    versions and columns. Its text may be incomplete. After a fault the indices begin at 0 again."""


@dataclass(frozen=True)
class ScoreResult:
    """Log-probs of n given tokens in nats, over the whole vocabulary."""

    log_probs: np.ndarray
    """Log-probs of the given tokens, float32 [n]."""
    top: tuple[np.ndarray, np.ndarray] | None = None
    """On request: the ids, int32 [n, K], of the K most probable tokens at each position, most probable first, and
    their log-probs, float32 [n, K]."""
    weight_versions: list[int] = field(default_factory=list)
    """Versions of the weights when the request entered and left the engine (a single entry if they are equal)."""


class TokenScorer(Protocol):
    """An object that computes the log-probs of given tokens: an engine of the run, or a teacher on a server."""

    async def score(
        self,
        token_ids: list[int],
        *,
        start: int,
        top_k: int = 0,
        deadline_s: float,
        images: ImageInputs | None = None,
    ) -> ScoreResult:
        """Returns the log-probs of `token_ids[start:]`, each given the tokens before it. Retries as
        `RolloutEngine.generate`.

        The temperature is 1, whatever the temperature of samples, unless the model is served with its logits divided by
        a temperature (`slime.roles.served.ServedModel`). Raises ValueError for a `start` outside [1, n), because the
        first token has no prediction, and for tokens that the engine rejects.
        """
        ...


class RolloutEngine(TokenScorer, Protocol):
    """A client of a served model. Implementations are picklable, because they are sent to the rollout manager."""

    streams: bool
    """True if `generate` calls `on_tokens`. Otherwise a completion arrives only when it is complete."""
    has_parts: bool
    """True if `generate` accepts `parts`. An engine without this attribute does not."""

    async def context_tokens(self, deadline_s: float) -> int:
        """Returns the limit on the tokens of a prompt with its completion, which never changes. Retries as `generate`.
        The limit of an engine without this method is unknown."""
        ...

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        seed: int,
        deadline_s: float,
        columns: Mapping[str, int] = MappingProxyType({}),
        session: str | None = None,
        on_tokens: OnTokens | None = None,
        parts: AnswerParts | None = None,
        images: ImageInputs | None = None,
    ) -> GenerateResult:
        """Samples a completion. Retries transient faults until `deadline_s` seconds have passed, then TimeoutError.

        Requests with the same `session` are sent to the same engine if the router's policy allows it, so that they
        share its prefix cache.

        `on_tokens` gets tokens during generation, which changes neither the tokens nor the result. The last tokens may
        arrive only with the result. After a fault the indices begin at 0 again, and the tokens may differ.

        `parts` gets tokens every few seconds, which changes neither the tokens nor the result. A caller leaves it out
        for an engine without `has_parts`.

        `columns` maps the name of each requested engine column to its argument, such as {TOP: 8}. Raises ValueError for
        a column that the engine cannot provide.

        `sampling_params` uses slime's names: temperature, top_p, top_k, max_new_tokens, min_new_tokens, stop,
        stop_token_ids, skip_special_tokens. A prompt that the engine rejects raises ValueError at once.

        `images` are the processed images of the prompt, in its order. `token_ids` contains the ids that stand for them.
        Raises ValueError if the ids do not fit the images. A caller leaves `images` out for a prompt without images.
        """
        ...

    async def abort_all(self) -> None:
        """Ends every running request. Each request returns its tokens so far with finish_reason "abort"."""
        ...

    async def close(self) -> None: ...


class EnginePool(Protocol):
    """The running engines, as the driver sees them."""

    @property
    def facts(self) -> Mapping[str, object]:
        """Returns run-time values that hooks find in their `args` in addition to the flags, such as the router's
        address."""
        ...

    def client(self) -> RolloutEngine | None:
        """Returns the client for the rollout manager's requests, or None without engines."""
        ...

    def launch(self) -> None:
        """Starts the processes of the engines. Those that share a device with a trainer wait until `wait_ready`."""
        ...

    def check_launched(self) -> None:
        """Raises an error if a process of an engine or of its router has ended. For use between the two other calls."""
        ...

    def wait_ready(self) -> None:
        """Returns when the engines serve."""
        ...

    def publish(self, version: int) -> Mapping[str, float]:
        """Loads the trainer's current weights as `version` on every engine and returns the metrics of the update.
        Generation pauses during the update."""
        ...

    def allow_restarts(self) -> None:
        """Resets the count of engine restarts. An update also resets it, but a frozen model has no updates."""
        ...

    def sleep(self) -> None:
        """Frees the devices for the trainer."""
        ...

    def wake(self) -> bool:
        """Takes the devices back. Returns True if the engines have dropped their weights, and serve only after the next
        update."""
        ...

    def check_health(self) -> None:
        """Raises RuntimeError with the engine's last log lines if an engine has failed permanently."""
        ...

    def stop(self) -> None: ...


class NoEngines:
    """The pool of a run that only trains (--debug-train-only). It has no engines, so its methods do nothing."""

    facts: Mapping[str, object] = MappingProxyType({})

    def client(self) -> None: ...

    def launch(self) -> None: ...

    def check_launched(self) -> None: ...

    def wait_ready(self) -> None: ...

    def publish(self, version: int) -> Mapping[str, float]:
        return {}

    def allow_restarts(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> bool:
        return False

    def check_health(self) -> None: ...

    def stop(self) -> None: ...
