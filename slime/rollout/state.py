"""This module holds the state of generation: the engines, the tokenizer, a limit on concurrency, and an event loop.

The rollout manager makes one `GenerateState`. Functions get it in a `slime.rollout.context.RunContext`.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
import weakref
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from slime.config.schema import Config
from slime.config.sections.rollout import RolloutConfig
from slime.data.limits.context import longest_sequence
from slime.data.media.references import lacks_references, make_references
from slime.data.openings import ChatRemarks
from slime.data.rows import render_chat
from slime.data.tokenizer import opened, opening_ids
from slime.event_loop import loop_objects, watch_loop
from slime.protocols import GenerateResult, RolloutEngine
from slime.records.errors import FlagError
from slime.rollout.stream.concurrency import Concurrency
from slime.rollout.stream.prompt_encoder import PromptEncoder
from slime.tracking.events import Events
from slime.tracking.traces.sample_spans import SampleSpans
from slime.types import Prompt, Sample, SampleGroup, SamplingParams
from slime.vision.inputs import ImageInputs, TrainInputs
from slime.vision.processor import Expansion, MediaProcessor, list_media, load_processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

T = TypeVar("T")

_PROMPTS_REMEMBERED = 4096


class NoRunError(RuntimeError):
    """The process has no run whose state a hook could read."""

    def __init__(self) -> None:
        super().__init__(
            "GenerateState(args) must be called while a rollout runs, got no state in this process; call it from a hook"
        )


_entered: list[weakref.ref[GenerateState]] = []


def rollout_sampling_params(rollout: RolloutConfig) -> SamplingParams:
    """Returns the sampling parameters of training samples, under the names that generate functions use."""
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
    """Returns the name from which the seeds of a sample's requests are computed."""
    return sample.session_id or f"sample/0/{sample.index}"


def request_seed(run_seed: int, session_id: str, generated_tokens: int, retry: int = 0) -> int:
    """Returns a request's seed: the first 52 bits of sha256(f"{run_seed}/{session_id}/{generated_tokens}").

    `retry` counts the times that a plug-in has reset the sample; from 1 on, f"/{retry}" is appended to the text.
    `session_id` is "rollout/{sample index}" (see `generate_and_rm_group`). A run therefore repeats exactly if the
    engine's results do not depend on its batch, and two requests share a seed only by chance. Every JSON implementation
    keeps integers of 52 bits.
    """
    again = f"/{retry}" if retry else ""
    digest = hashlib.sha256(f"{run_seed}/{session_id}/{generated_tokens}{again}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 12


class GenerateState:
    """The state of a run's generation. `engine` is None if no sample is generated (SFT, replay of saved samples).

    `frozen_engines` maps the names of the run's frozen models to their engine clients (`slime.roles.served`). `args`
    are the flags that hooks get; the default is made from `config`.

    `semaphore` limits the samples in generation to `server_concurrency` per engine, or to an adaptive limit. `aborted`
    makes running generations stop. `timed_out` maps the random stream of a sample to the reason why it passed its
    deadline. `request_figures` maps a metric to its values, one per request since `take_figures`. `requests` counts the
    requests of a random stream by the number of tokens before them, so that a sample that restarts draws another
    response. `allowed` is the last rollout whose groups may be started. `version` is the version of the engines'
    weights, None before the first version. `events` are the run's events, and `spans` time its samples. `chat_remarks`
    warns about requests of sessions. `progress` is (samples finished, samples wanted) of the current rollout, for a
    progress bar. `sampling_params` apply to training samples. `processor` is the model's own
    processor for images and videos, None for a model of text.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine | None,
        tokenizer: PreTrainedTokenizerBase,
        frozen_engines: Mapping[str, RolloutEngine] = MappingProxyType({}),
        *,
        hook_args: Namespace | None = None,
        chat_parser_path: str | None = None,
    ) -> None:
        self.config = config
        self.args = config.namespace() if hook_args is None else hook_args
        self.engine = engine
        self.frozen_engines = frozen_engines
        self.tokenizer = tokenizer
        self.chat_parser_path = chat_parser_path
        """Import path of the rollout backend's function that makes the parser of a model's messages."""
        engines = max(1, config.num_engines)
        limit = config.engine
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
        self.events = Events("rollout", config.logging.run_dir)
        self.chat_remarks = ChatRemarks(tokenizer)
        self.spans = SampleSpans(config.logging.otlp_traces_endpoint)
        self.sampling_params = rollout_sampling_params(config.rollout)
        self.eval_prompts: dict[tuple[str, bool], Sequence[Prompt]] = {}
        self.held_out: dict[str, list[Sample]] = {}
        self.busy = False
        self._parts: dict[type, object] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        # The samples of a group share their prompt, so each prompt is tokenised once.
        self._encode = functools.lru_cache(_PROMPTS_REMEMBERED)(self._encode_uncached)

    def enter(self) -> GenerateState:
        """Makes this state the one that plug-ins in this process use, until `close`, and returns the state."""
        _entered.append(weakref.ref(self))
        return self

    def part(self, kind: type[T], make: Callable[[], T]) -> T:
        """Returns this run's only object of type `kind`. The first call makes the object."""
        if kind not in self._parts:
            self._parts[kind] = make()
        found = self._parts[kind]
        assert isinstance(found, kind)
        return found

    def has_part(self, kind: type[T]) -> T | None:
        """Returns the object that `part` has made for `kind`, or None."""
        found = self._parts.get(kind)
        assert found is None or isinstance(found, kind)
        return found

    def drop_part(self, kind: type) -> None:
        """Removes the object that `part` has made for `kind`."""
        self._parts.pop(kind, None)

    def served(self, name: str) -> RolloutEngine:
        """Returns the engine client of the run's frozen model `name` (--frozen-model). Hooks call its `generate` and
        `score` with token ids. Raises ValueError for an unknown name."""
        if name not in self.frozen_engines:
            raise ValueError(
                f"name must be one of the run's frozen models, {sorted(self.frozen_engines)}, got {name!r}; add it "
                "to the file of models, or with --frozen-model"
            )
        return self.frozen_engines[name]

    @functools.cached_property
    def context(self) -> tuple[int | None, str]:
        """Returns the engines' limit on prompt and response tokens together, and the name of its setting."""
        return longest_sequence(self.config)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Returns the event loop of `run`, or None before the first call."""
        return self._loop

    @property
    def concurrency(self) -> int:
        """Returns the limit on the number of samples in generation."""
        return self.semaphore.limit

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Runs the coroutine to its end in this state's event loop (a daemon thread). Every thread may call this.

        The whole run uses one loop, because the engine's connections belong to the loop. Interrupting the caller
        cancels the coroutine.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Starts the coroutine in this state's event loop, and returns at once. Every thread may call this."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run_loop, args=(self._loop,), name="rollout", daemon=True)
            thread.start()
            watch_loop(self._loop, thread)
            loop_objects(self._loop).closes = True
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Closes the engines' connections and ends the loop. After that, `run` no longer works."""
        _entered[:] = [each for each in _entered if each() not in (None, self)]
        self.events.close()
        self.spans.close()
        if self._loop is None:
            return
        self.run(_close_objects())
        for engine in (self.engine, *self.frozen_engines.values()):
            if engine is not None:
                self.run(engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None

    def begin(self) -> None:
        """Starts a rollout. Only one rollout runs at a time, because its end may abort every request."""
        if self.busy:
            raise RuntimeError("rollouts must take turns, got a second one while the first is running")
        self.busy = True
        self.aborted = False
        self.progress = (0, 0)

    def end(self) -> None:
        self.busy = False

    def allow(self, rollout_id: int, version: int) -> None:
        """Allows groups of rollouts up to `rollout_id` to start, and records that the engines have weights `version`.
        Every thread may call this."""
        self.version = version  # Set first: a group that is allowed from now on has these weights.
        self.allowed = max(self.allowed, rollout_id)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    def set_engines(self, count: int) -> None:
        """Adapts the limit on samples in generation to `count` engines. Every thread may call this."""
        first = self.config.engine.server_concurrency * count
        if self._loop is None:
            self.semaphore.scale(first)
        else:
            self._loop.call_soon_threadsafe(self.semaphore.scale, first)

    async def changed(self, tasks: Iterable[asyncio.Task[SampleGroup]]) -> None:
        """Returns when a task has ended or `allow` was called."""
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait([*tasks, news], return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            self._news.clear()

    def forget(self, samples: SampleGroup) -> list[str]:
        """Removes the records of samples whose generation has ended. Returns the reasons of samples that passed their
        deadline."""
        streams = [random_stream(sample) for sample in samples]
        for stream in streams:
            self.requests.pop(stream, None)
        return [self.timed_out.pop(stream) for stream in streams if stream in self.timed_out]

    def take_figures(self) -> dict[str, list[float]]:
        """Returns the figures of the requests since the previous call."""
        figures, self.request_figures = self.request_figures, {}
        return figures

    def note_request(self, seconds: float, result: GenerateResult) -> None:
        """Records the times of a completed request under slime's metric names. Values that the engine did not report
        are left out. `seconds` is the time from request to response, including retries and the router."""
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

    @functools.cached_property
    def media(self) -> MediaProcessor | None:
        """Returns the processor of prompts' images and videos, or None for a model of text."""
        checkpoint = self.config.rollout.hf_checkpoint
        if not checkpoint:
            return None
        found = load_processor(checkpoint, trust_remote_code=self.config.train.trust_remote_code)
        return None if found is None else MediaProcessor(found)

    @property
    def processor(self) -> ProcessorMixin | None:
        """Returns the model's processor under slime's name."""
        return None if self.media is None else self.media.processor

    async def encode_prompt(self, sample: Sample) -> list[int]:
        """Returns `prompt_ids`. Images are processed in a thread, once for the samples of a group."""
        if sample.multimodal_inputs is None:
            return self.prompt_ids(sample)
        return await self.part(PromptEncoder, lambda: PromptEncoder(self.prompt_ids)).encode(sample)

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Returns the token ids of the sample's prompt. The chat template renders messages first. A text that no chat
        template rendered gets the tokenizer's BOS token, as in transformers. Sets `multimodal_train_inputs` for a
        prompt with images, whose ids have one id per feature of an image."""
        kwargs = sample.apply_chat_template_kwargs
        text = sample.prompt
        if not isinstance(text, str):
            text = render_chat(text, self.tokenizer, kwargs or {}, sample.metadata.get("tools"))
        images = self.start_expansion(sample.multimodal_inputs)
        ids = list(self._encode(text if images is None else images.expand(text)))
        if kwargs is None and isinstance(sample.prompt, str):
            ids = opened(ids, self._opening)
        if images is not None:
            sample.multimodal_train_inputs = images.finish(ids)
        return ids

    async def reference_images(self, sample: Sample) -> TrainInputs | None:
        """Returns references to the sample's images, whose files exist. A plug-in's tensors are stored for this, and
        the sample keeps them. Files that are gone are made again."""
        inputs, sources = sample.multimodal_train_inputs, sample.multimodal_inputs or {}
        if not lacks_references(inputs) or self.media is None:
            return inputs
        checkpoint = self.config.rollout.hf_checkpoint or ""
        found = await asyncio.to_thread(make_references, inputs, sources, self.media, checkpoint)
        if isinstance(inputs, ImageInputs):
            sample.multimodal_train_inputs = found
        return found

    def start_expansion(self, inputs: Mapping[str, object] | None) -> Expansion | None:
        """Returns the expansion of a prompt with images, whose `inputs` have slime's form: the lists `images` and
        `videos`. Returns None for a prompt of text. Raises ValueError for images without a processor."""
        if inputs is None:
            return None
        if self.media is None:
            raise FlagError(
                "a prompt with images",
                "be for a model with a processor",
                self.config.rollout.hf_checkpoint,
                "train a model with a vision tower, or leave --multimodal-keys out",
            )
        return Expansion(self.media, *(list_media(inputs, kind) for kind in ("images", "videos")))

    async def context_tokens(self) -> int | None:
        """Returns the engines' limit on the tokens of a prompt with its response, or None if the limit is unknown.
        Raises TimeoutError if no engine responds within --rollout-deadline-s."""
        ask = getattr(self.engine, "context_tokens", None)
        async with self._asking:
            if self._context is None and ask is not None:
                self._context = await ask(self.config.rollout.rollout_deadline_s)
        return self._context

    @functools.cached_property
    def _opening(self) -> list[int]:
        return opening_ids(self.tokenizer)

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


async def _close_objects() -> None:
    await loop_objects().close()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped, and closes it."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def entered() -> GenerateState | None:
    """Returns the state of this process's run (`GenerateState.enter`), or None in a process without a run."""
    living = [state for each in _entered if (state := each()) is not None]
    return living[-1] if living else None


def current_state() -> GenerateState:
    """Returns the state of this process's run. Raises RuntimeError in a process without a run."""
    if (state := entered()) is None:
        raise NoRunError
    return state
