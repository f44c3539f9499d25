"""What the loop needs of the rollout engine, the engine pool, the trainer and the rollout manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypedDict, get_args

import numpy as np

from slime.types import SampleGroup, SamplingParams

FinishReason = Literal["stop", "length", "abort"]
VERSIONS = "token_versions"
"""The column (`slime.data.columns`) with the version of the weights that sampled each token."""
UNKNOWN_VERSION = -2
"""In that column: of a token that no engine sampled, or whose engine does not say."""
OnTokens = Callable[[int, list[int], list[float]], None]
"""Called with the place of the first of some new tokens in the completion, their ids and their log-probs."""


@dataclass(frozen=True)
class GenerateResult:
    """One completion."""

    token_ids: list[int]
    log_probs: list[float]
    """Nats under the temperature-scaled distribution, one per token of `token_ids`."""
    text: str
    finish_reason: FinishReason
    weight_versions: list[int]
    """Of the weights that sampled the tokens, oldest first (one entry when it is one version)."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float | None = None
    """How long the request waited in the engine before that first computed. None where the engine does not say."""
    preemptions: int = 0
    """How often the engine gave its memory to another request and computed it again. 0 where it does not say."""
    decode_tokens_per_s: float | None = None
    """Its speed after the first token. None where the engine does not say."""
    routed_experts: np.ndarray | None = None
    """Where asked for: the experts that each token was sent to, as an unsigned integer array [tokens, layers,
    experts of a token]."""
    kept: tuple[list[int], list[int]] | None = None
    """Where asked for: the ids that top-p, top-k and min-p kept, and how many of them are of each token; 0 for a token
    that kept more than was asked for."""
    top: tuple[np.ndarray, np.ndarray] | None = None
    """Where asked for: the likeliest ids of each token and their log-probs (`slime.data.top_tokens`)."""
    columns: dict[str, list[float]] = field(default_factory=dict)
    """Other values of the engine, one per token of `token_ids`, by the names that `slime.data.columns` has for
    them."""
    speculation: tuple[int, int, int] | None = None
    """Passes that checked a draft, drafted tokens, accepted tokens. None where the engine does not say."""
    version_starts: list[int] | None = None
    """The first token of each of `weight_versions`. None where the engine does not say."""

    @property
    def token_columns(self) -> dict[str, list[float]]:
        """`columns`, and `VERSIONS` where the version of each token is known."""
        starts = [0] if len(self.weight_versions) == 1 else self.version_starts
        if starts is None:
            return self.columns
        ends = [*starts[1:], len(self.token_ids)]
        pieces = zip(self.weight_versions, starts, ends, strict=True)
        versions: list[float] = [version for version, start, end in pieces for _ in range(start, end)]
        return {**self.columns, VERSIONS: versions}


@dataclass(frozen=True)
class ScoreResult:
    """Log-probs of n given tokens in nats, over the whole vocabulary."""

    log_probs: np.ndarray
    """float32 [n]."""
    top: tuple[np.ndarray, np.ndarray] | None = None
    """Where asked for: the ids, int32 [n, K], of the K most probable tokens at each place, most probable first, and
    their log-probs, float32 [n, K]."""
    weight_versions: list[int] = field(default_factory=list)
    """The versions live when the request entered and left the engine (one entry when equal)."""


class ReplayFields(TypedDict, total=False):
    """Arguments of `RolloutEngine.generate` for what the trainer replays."""

    experts_from: int
    kept_tokens: int
    top_tokens: int


class RolloutEngine(Protocol):
    """A served model. Implementations are picklable: they travel to the rollout manager's process."""

    streams: bool
    """Whether `generate` takes `on_tokens`. Otherwise a completion comes when it is whole."""

    async def context_tokens(self, deadline_s: float) -> int:
        """The most tokens of a prompt with its completion, a number that does not change. Retries as `generate` does.
        The limit of an engine without this method is unknown."""
        ...

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        seed: int,
        deadline_s: float,
        experts_from: int | None = None,
        kept_tokens: int = 0,
        top_tokens: int = 0,
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> GenerateResult:
        """Sample one completion; retry transient faults until `deadline_s` seconds have passed, then TimeoutError.

        `session`: requests of one session go to the same engine where the router's policy allows it, for its cache of
        prefixes.

        `on_tokens` gets tokens while the completion is made, which changes neither them nor the result. The last ones
        may come with the result alone. After a fault the places begin at 0 again, and the tokens may be others.

        `experts_from`: `routed_experts` shall hold the tokens from that place on, prompt included, up to the last but
        one (the last was never fed back). None: it stays None. `kept_tokens`: `kept` shall hold sets of at most that
        many ids. `top_tokens`: `top` shall hold that many ids of each token.

        `sampling_params` uses slime's names: temperature, top_p, top_k, max_new_tokens, min_new_tokens, stop,
        stop_token_ids, skip_special_tokens. A prompt the engine refuses raises ValueError at once.
        """
        ...

    async def score(
        self, token_ids: list[int], *, start: int, top_k: int = 0, deadline_s: float
    ) -> ScoreResult:
        """The log-probs of `token_ids[start:]`, each given the tokens before it. Retries as `generate` does.

        They are at temperature 1, whatever samples are drawn at, unless the model is served with its logits divided
        by a temperature (`slime.roles.served.ServedModel`). ValueError for a `start` outside [1, n), because nothing
        predicts the first token, and for tokens that the engine refuses.
        """
        ...

    async def abort_all(self) -> None:
        """End every running request; each returns what it has with finish_reason "abort"."""
        ...

    async def close(self) -> None: ...


WeightKind = Literal["full", "adapter", "delta"]
CHECKPOINT = -1
"""The `WeightSet.base_version` of the weights in the engine's own checkpoint, which never change."""


@dataclass(frozen=True)
class WeightSet:
    """What an update of the engines' weights holds. The trainer's publisher puts the record on every part, channels
    carry it unchanged, and the receiver has one loader per kind."""

    kind: WeightKind = "full"
    """full: all weights by their HF names. adapter: the matrices of a LoRA adapter by PEFT's names. delta: what changed
    since the base, one `slime.weight_sync.delta.payload` by the HF name of each tensor."""
    base_version: int | None = None
    """The version of the weights that the set is applied to. None for a set that needs no others."""
    name: str = ""
    """Of an adapter: what requests call it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of an adapter: PEFT's adapter_config.json. With --update-weight-mode delta: {"chain", "version"}, and of a delta
    also {"tensors" (their number), "compare", "refusals" (see slime.weight_sync.delta)}."""

    def message(self) -> dict[str, object]:
        """The record as plain data. Empty for full weights: a message without a record means them."""
        return {} if self == FULL else {"weights": asdict(self)}

    @classmethod
    def of(cls, record: Mapping[str, Any] | None) -> WeightSet:
        """The record of an engine's message. ValueError for a kind that this version does not know."""
        given = dict(record or {})
        if (kind := given.get("kind", "full")) not in get_args(WeightKind):
            raise ValueError(
                f"a set of weights must be one of {', '.join(get_args(WeightKind))}, got {kind}; trainer and engine "
                "must have the same version"
            )
        return cls(**given)


FULL = WeightSet()


@dataclass(frozen=True)
class WeightUpdate:
    """One published version of the weights, or a part of it, as plain data."""

    version: int
    channel: str
    """Its name in slime.weight_sync.registry."""
    info: Mapping[str, Any]
    """That channel's own, JSON-serialisable (of a file: {"path": ...})."""
    lasting: bool = True
    """These are all weights, for as long as they are the newest. Otherwise they are gone when the part after the
    next one is asked for."""
    weights: WeightSet = FULL
    """What all parts of the update hold together."""
    size_bytes: int | None = None
    """Bytes that an engine gets of this part; None: not known."""
    density: float = 1.0
    """Of the whole update: the share of the weights' bytes that belong to values which it changes."""

    def message(self) -> dict[str, object]:
        """What engines get of it."""
        return {"channel": self.channel, "info": self.info, **self.weights.message()}


class EnginePool(Protocol):
    """The running engines, as the driver sees them."""

    @property
    def facts(self) -> Mapping[str, object]:
        """What hooks find in their `args` besides the flags, such as the address of the router."""
        ...

    def client(self) -> RolloutEngine | None:
        """What the rollout manager sends its requests to; None without engines."""
        ...

    def start(self, meanwhile: Callable[[Callable[[], None]], object]) -> None:
        """Start the engines; returns when they serve. `meanwhile` runs while they start; it gets a function to call now
        and then, which raises when an engine has ended."""
        ...

    def publish(self, version: int) -> Mapping[str, float]:
        """Load the trainer's current weights, as `version`, on every engine; generation pauses meanwhile. Returns the
        metrics of the update."""
        ...

    def allow_restarts(self) -> None:
        """Count restarts of engines anew: a frozen model has no updates after which a pool does so itself."""
        ...

    def sleep(self) -> None:
        """Give the devices to the trainer."""
        ...

    def wake(self) -> bool:
        """Take the devices back. True: the engines dropped their weights to sleep, and serve after the next update."""
        ...

    def check_health(self) -> None:
        """Raise RuntimeError with the engine's last log lines when an engine is lost for good."""
        ...

    def stop(self) -> None: ...


class NoEngines:
    """The pool of a run that only trains (--debug-train-only): there is nothing to update, put to sleep or lose."""

    facts: Mapping[str, object] = MappingProxyType({})

    def client(self) -> None: ...

    def start(self, meanwhile: Callable[[Callable[[], None]], object]) -> None:
        meanwhile(lambda: None)

    def publish(self, version: int) -> Mapping[str, float]:
        return {}

    def allow_restarts(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> bool:
        return False

    def check_health(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Logged:
    """What one call of `slime.tracking.outbox.log` has logged at a step of rollout/step, train/step or eval/step."""

    metrics: dict[str, float]
    step: int
    step_key: str


@dataclass(frozen=True)
class RolloutBatch:
    """What one rollout hands to training. Tokens and FLOPs are of the samples that are trained on, all ranks
    together."""

    rank_data: list[object]
    """A reference to the data of each data-parallel rank, of one group of trainer ranks after the other
    (`slime.roles.groups`)."""
    metrics: dict[str, float]
    tokens: int
    """Prompts included. A prompt that several samples share counts for each of them."""
    forward_flops: float
    """Of one forward pass (`slime.data.packing.forward_flops`). A shared prompt counts as often as it is computed."""
    old_flops: float = 0.0
    """The same of the pass for old log-probs, which may leave out the samples of the first step."""
    ahead_flops: float = 0.0  # of training the layers of multi-token prediction
    logged: list[Logged] = field(default_factory=list)
    learning: dict[str, float] = field(default_factory=dict)  # from `slime.rollout.learning`


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation."""

    metrics: dict[str, float]
    """eval/*; none if a function of the user has logged them."""
    logged: list[Logged] = field(default_factory=list)


class RolloutHandle(Protocol):
    """The rollout manager, as the driver sees it."""

    def generate(self, rollout_id: int, saves: bool, version: int) -> Future[RolloutBatch]:
        """The data of rollout `rollout_id`; its groups may be started from now on, and the engines have the weights
        `version`. `saves`: a checkpoint follows it, so the data position is saved, too. Calls end in their order."""
        ...

    def evaluate(self, rollout_id: int) -> Future[Evaluated]:
        """Evaluate with the present weights, beside rollouts that run ahead."""
        ...

    def progress(self) -> tuple[int, int]:
        """(samples finished, samples wanted) of what runs now; answers at once."""
        ...


class TrainerHandle(Protocol):
    """All trainer ranks, as the driver sees them."""

    @property
    def start_rollout_id(self) -> int:
        """The first rollout to train: 0, or the one after the loaded checkpoint."""
        ...

    def train(self, rollout_id: int, rank_data: list[object]) -> Future[TrainResult]: ...

    def progress(self) -> tuple[int, int]:
        """(micro-batches trained, micro-batches of the rollout) on one rank; answers at once."""
        ...

    def save(self, rollout_id: int) -> Future[None]:
        """Save a checkpoint. With --async-save, done when the values are copied."""
        ...

    def finish_save(self) -> Future[None]:
        """Done when the files of the last save are complete."""
        ...


class WeightSource(Protocol):
    """All trainer ranks, as the engine pool sees them."""

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        """The first part of the weights as `version`; each further call gives the next part, and None after the last.

        The trainer makes a part while engines load the part before. `receivers`: the number of workers of each engine
        that will take the parts, by a name that changes when the engine restarts. With other receivers than in the call
        before, all parts come again. A version that is asked for again comes as the whole set.
        """
        ...

    def weights_file(self) -> Future[WeightUpdate]:
        """The current weights in a file, for an engine that starts between two updates. May be called by any thread."""
        ...


@dataclass(frozen=True)
class TrainResult:
    """The metrics of training on one rollout."""

    steps: list[dict[str, float]]
    """train/* of each optimizer step."""
    rollout: dict[str, float]
    """rollout/* means over the data."""
    perf: dict[str, float]
    """perf/* of rank 0."""
    logged: list[Logged] = field(default_factory=list)


class DataSource(Protocol):
    """Where prompts come from and unfinished groups return to (`--data-source-path`)."""

    def get_samples(self, num_groups: int) -> list[SampleGroup]: ...

    def add_samples(self, groups: list[SampleGroup]) -> None: ...

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int) -> None: ...

    def __len__(self) -> int: ...
