"""The state of generation: the engine, the tokenizer, a limit on concurrency, and an event loop.

The rollout manager builds one `GenerateState`. Rollout functions get it as `args.rollout_state`.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from slime import http
from slime.config.schema import Config, section_of
from slime.config.sections.cluster import ClusterConfig
from slime.config.sections.engine import EngineConfig
from slime.config.sections.logging import LoggingConfig
from slime.config.sections.rollout import RolloutConfig
from slime.data.limits.context import longest_sequence
from slime.data.openings import ChatRemarks
from slime.data.rows import render_chat
from slime.data.tokenizer import opened, opening_ids
from slime.protocols import GenerateResult, RolloutEngine
from slime.rollout.stream.concurrency import Concurrency
from slime.tracking.events import Events
from slime.tracking.traces.sample_spans import SampleSpans
from slime.types import Prompt, Sample, SampleGroup, SamplingParams
from slime.user_code import watch_loop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_PROMPTS_REMEMBERED = 4096
_newest: weakref.ref[GenerateState] | None = None
_own_loop: asyncio.AbstractEventLoop | None = None


def rollout_sampling_params(rollout: RolloutConfig) -> SamplingParams:
    """The sampling parameters of training samples, under the names that generate functions use."""
    return {
        "temperature": rollout.rollout_temperature,
        "top_p": rollout.rollout_top_p,
        "top_k": rollout.rollout_top_k,
        "max_new_tokens": rollout.rollout_max_response_len,
        "stop": rollout.rollout_stop,
        "stop_token_ids": rollout.rollout_stop_token_ids,
        "skip_special_tokens": rollout.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def random_stream(sample: Sample) -> str:
    """The name that decides the seeds of a sample's requests."""
    return sample.session_id or f"sample/0/{sample.index}"


class GenerateState:
    """One per rollout manager. `engine` is None if no sample is generated (SFT, replay of saved samples).
    `frozen_engines`: those of the run's frozen models, by their names (`slime.roles.served`).

    `semaphore` limits the samples in generation to `server_concurrency` per engine, or adapts. `aborted` makes running
    generations stop. `timed_out` maps the random stream of a sample to the reason why it passed its deadline.
    `request_figures` maps a metric to its values, one per request since `take_figures`. `requests` counts the requests
    of a random stream by the tokens before them, so that a sample that starts again draws another response.
    `allowed` is the last rollout whose groups may be started, and `version` the weights of the engines (None: not
    said). `events` are those of the run, and `spans` time its samples. `chat_remarks` warns of what sessions ask.
    `progress` is (samples finished, samples wanted) of the current rollout, for a progress bar. `sampling_params` are
    those of training samples. `processor` is None: prompts are text only.
    """

    def __init__(
        self,
        args: Namespace,
        engine: RolloutEngine | None,
        tokenizer: PreTrainedTokenizerBase,
        frozen_engines: Mapping[str, RolloutEngine] = MappingProxyType({}),
    ) -> None:
        self.args = args
        self.engine = engine
        self.frozen_engines = frozen_engines
        self.tokenizer = tokenizer
        cluster = section_of(ClusterConfig, args)
        engines = max(1, (cluster.rollout_num_gpus or 1) // cluster.rollout_num_gpus_per_engine)
        limit = section_of(EngineConfig, args)
        self.semaphore = Concurrency(limit.server_concurrency * engines, adapts=limit.adapts_concurrency)
        self.aborted = False
        self.timed_out: dict[str, str] = {}
        self.request_figures: dict[str, list[float]] = {}
        self.requests: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.progress = (0, 0)
        self.allowed = -1
        self.version: int | None = None
        self._news = asyncio.Event()
        self._context: int | None = None
        self._asking = asyncio.Lock()
        self.events = Events("rollout", section_of(LoggingConfig, args).run_dir)
        self.chat_remarks = ChatRemarks(tokenizer)
        self.spans = SampleSpans(section_of(LoggingConfig, args).otlp_traces_endpoint)
        self.sampling_params = rollout_sampling_params(section_of(RolloutConfig, args))
        self.processor = None  # prompts are text
        self.eval_prompts: dict[tuple[str, bool], Sequence[Prompt]] = {}
        self.held_out: dict[str, list[Sample]] = {}
        self.at_close: list[Callable[[], Awaitable[None]]] = []
        """Each is awaited in this state's loop before the loop ends."""
        self.busy = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # The samples of a group share their prompt, so each prompt is tokenised once.
        self._encode = functools.lru_cache(_PROMPTS_REMEMBERED)(self._encode_uncached)
        global _newest
        _newest = weakref.ref(self)

    def served(self, name: str) -> RolloutEngine:
        """The engine client of the run's frozen model `name` (--frozen-model), for hooks: `generate` and `score` of
        token ids. ValueError for another name."""
        if name not in self.frozen_engines:
            raise ValueError(
                f"name must be one of the run's frozen models, {sorted(self.frozen_engines)}, got {name!r}; add it "
                "to the file of models, or with --frozen-model"
            )
        return self.frozen_engines[name]

    @functools.cached_property
    def context(self) -> tuple[int | None, str]:
        """The most tokens that prompt and response may have together in the engines, and what sets the number."""
        return longest_sequence(Config.of_args(self.args))

    @property
    def concurrency(self) -> int:
        """The limit of samples in generation."""
        return self.semaphore.limit

    def __deepcopy__(self, memo: dict[int, object]) -> GenerateState:
        """Returns this object: hooks deep-copy `args`, and the engine and the loop must stay the same."""
        return self

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run the coroutine to its end in this state's own loop (a daemon thread). Every thread may call this.

        The whole run uses one loop, because the engine's connections belong to it. Interrupting the caller cancels
        the coroutine.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Run the coroutine in this state's own loop, and return at once. Every thread may call this."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run_loop, args=(self._loop,), name="rollout", daemon=True)
            thread.start()
            watch_loop(self._loop, thread)
            http.keep_connections(self._loop)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Close the engine's connections and end the loop. After that, `run` no longer works."""
        self.events.close()
        self.spans.close()
        if self._loop is None:
            return
        for end in self.at_close:
            self.run(_awaited(end))
        for engine in (self.engine, *self.frozen_engines.values()):
            if engine is not None:
                self.run(engine.close())
        self.run(http.close_connections())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None

    def begin(self) -> None:
        """Start a rollout. Only one runs at a time, because its end may abort every request."""
        if self.busy:
            raise RuntimeError("rollouts must take turns, got a second one while the first is running")
        self.busy = True
        self.aborted = False
        self.progress = (0, 0)

    def end(self) -> None:
        self.busy = False

    def allow(self, rollout_id: int, version: int) -> None:
        """Groups of rollouts up to `rollout_id` may be started, and the engines have the weights `version`. Every
        thread may call this."""
        self.version = version  # first: a group that is allowed from now on has these weights
        self.allowed = max(self.allowed, rollout_id)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    def set_engines(self, count: int) -> None:
        """That many engines serve from now on: the limit of samples in generation follows. Every thread may call
        this."""
        first = section_of(EngineConfig, self.args).server_concurrency * count
        if self._loop is None:
            self.semaphore.scale(first)
        else:
            self._loop.call_soon_threadsafe(self.semaphore.scale, first)

    async def changed(self, tasks: Iterable[asyncio.Task[SampleGroup]]) -> None:
        """Return when one of the tasks has ended or `allow` was called."""
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait([*tasks, news], return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            self._news.clear()

    def forget(self, samples: SampleGroup) -> list[str]:
        """Drop what is kept of samples whose generation has ended. Returns the reasons of those that passed their
        deadline."""
        streams = [random_stream(sample) for sample in samples]
        for stream in streams:
            self.requests.pop(stream, None)
        return [self.timed_out.pop(stream) for stream in streams if stream in self.timed_out]

    def take_figures(self) -> dict[str, list[float]]:
        """The figures of the requests since the last call."""
        figures, self.request_figures = self.request_figures, {}
        return figures

    def note_request(self, seconds: float, result: GenerateResult) -> None:
        """Record the times of a completed request under slime's metric names. Values that the engine did not report
        are left out. `seconds` is the time from request to response, with retries and the router."""
        self.semaphore.note(seconds, result)
        figures = {
            "request/e2e_latency": seconds,
            "request/queue_time": result.queue_s,
            "decode/throughput": result.decode_tokens_per_s,
            "request/concurrency_limit": self.semaphore.limit if self.semaphore.adapts else None,
        }
        for name, value in figures.items():
            if value is not None:
                self.request_figures.setdefault(name, []).append(value)

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Token ids of the sample's prompt. The chat template renders messages first. A text that no template made
        gets the tokenizer's BOS, as from transformers."""
        kwargs = sample.apply_chat_template_kwargs
        if isinstance(sample.prompt, str):
            ids = list(self._encode(sample.prompt))
            return opened(ids, self._opening) if kwargs is None else ids
        return list(
            self._encode(
                render_chat(sample.prompt, self.tokenizer, kwargs or {}, sample.metadata.get("tools"))
            )
        )

    async def context_tokens(self) -> int | None:
        """The most tokens of a prompt with its response that the engines take; None where it is unknown.
        TimeoutError when no engine answers in --rollout-deadline-s."""
        ask = getattr(self.engine, "context_tokens", None)
        async with self._asking:
            if self._context is None and ask is not None:
                self._context = await ask(section_of(RolloutConfig, self.args).rollout_deadline_s)
        return self._context

    @functools.cached_property
    def _opening(self) -> list[int]:
        return opening_ids(self.tokenizer)

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


async def _awaited(end: Callable[[], Awaitable[None]]) -> None:
    await end()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run until the loop is stopped, and free its files."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def run_in_process(coroutine: Coroutine[object, object, T]) -> T:
    """Run the coroutine to its end in the loop of this process's rollout, or in a loop of its own without one.

    RuntimeError in a coroutine of that loop, which would wait for itself.
    """
    global _own_loop
    state = _newest() if _newest else None
    loop = _own_loop if state is None else state._loop
    if loop is not None and asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError(
            "run(coroutine) must not be called in a coroutine, got a call in one; await it there"
        )
    if state is not None:
        return state.run(coroutine)
    if _own_loop is None:
        _own_loop = asyncio.new_event_loop()
        threading.Thread(target=_own_loop.run_forever, name="plug-in", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _own_loop).result()


def of_process(args: Namespace | None = None) -> GenerateState:
    """The state of `args`, or this process's own for arguments that a hook made itself, and without arguments."""
    state: GenerateState | None = getattr(args, "rollout_state", None) or (_newest() if _newest else None)
    if state is None:
        raise RuntimeError(
            "GenerateState(args) must be called while a rollout runs, got no state in this process; call it from a hook"
        )
    return state
