"""What one generation needs: the engine, the tokenizer, a bound on concurrency, and an event loop to run in.

The rollout manager builds one `GenerateState` and hands it to rollout functions as `args.rollout_state`.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from slime.data.prompts import render_chat
from slime.protocols import GenerateResult, RolloutEngine
from slime.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_PROMPTS_REMEMBERED = 4096


class GenerateState:
    """One per rollout manager. `engine` is None where nothing is generated (SFT, replay of saved samples).

    `semaphore` bounds the samples being generated at a time to --vllm-server-concurrency per engine.
    `aborted` tells running generations to stop. `timed_out` maps the index of a sample to why it passed its
    deadline, and `request_figures` a metric to its values, one a request; both cover the present rollout.
    `progress` is (samples finished, samples wanted) of the present rollout, for whoever draws a bar.
    """

    def __init__(self, args: Any, engine: RolloutEngine | None, tokenizer: PreTrainedTokenizerBase) -> None:
        self.args = args
        self.engine = engine
        self.tokenizer = tokenizer
        engines = max(1, (args.rollout_num_gpus or 1) // args.rollout_num_gpus_per_engine)
        self.concurrency = args.vllm_server_concurrency * engines
        self.semaphore = asyncio.Semaphore(self.concurrency)
        self.aborted = False
        self.timed_out: dict[int | None, str] = {}
        self.request_figures: dict[str, list[float]] = {}
        self.progress = (0, 0)
        self.eval_prompts: dict[str, list[Prompt]] = {}
        self._busy = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # The samples of a group share their prompt: each is tokenised once.
        self._encode = functools.lru_cache(_PROMPTS_REMEMBERED)(self._encode_uncached)

    def __deepcopy__(self, memo: dict) -> GenerateState:
        """Hooks deep-copy `args`; the engine and the loop behind it stay the same."""
        return self

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to completion in this state's own loop (a daemon thread), from any thread.

        One loop for the whole run: the engine's connections live in it. Interrupting the caller cancels the
        coroutine.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True).start()
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the engine's connections and end the loop. The state cannot run anything afterwards."""
        if self._loop is None:
            return
        if self.engine is not None:
            self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None

    def begin(self) -> None:
        """Start a rollout or an evaluation; they take turns, because ending one aborts every request."""
        if self._busy:
            raise RuntimeError(
                "rollout and evaluation must take turns, got a second one while the first is running"
            )
        self._busy = True
        self.aborted = False
        self.timed_out.clear()
        self.request_figures.clear()
        self.progress = (0, 0)

    def end(self) -> None:
        self._busy = False

    def note_request(self, seconds: float, result: GenerateResult) -> None:
        """Keep what a request that was answered took, under slime's metric names; what the engine did not say is left
        out. `seconds`: from asking to the answer, retries and the router included."""
        figures = {
            "request/e2e_latency": seconds,
            "request/queue_time": result.queue_s,
            "decode/throughput": result.decode_tokens_per_s,
        }
        for name, value in figures.items():
            if value is not None:
                self.request_figures.setdefault(name, []).append(value)

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Token ids of the sample's prompt; messages are rendered by the chat template first."""
        if isinstance(sample.prompt, str):
            return list(self._encode(sample.prompt))
        kwargs = sample.apply_chat_template_kwargs or {}
        return list(
            self._encode(render_chat(sample.prompt, self.tokenizer, kwargs, sample.metadata.get("tools")))
        )

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))
