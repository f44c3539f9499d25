"""Defines a session: an agent's conversations with the engine, with their tokens, limits and samples."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections import Counter

from slime.data import columns
from slime.data.agents.blank_sample import blank
from slime.data.agents.session_record import KEY, SessionRecord
from slime.protocols import GenerateResult
from slime.rollout.context import RunContext
from slime.rollout.facts import note_sampling
from slime.rollout.generate import EVALUATION
from slime.rollout.rewards.finite import KEY as REMOVED
from slime.rollout.state import random_stream, request_seed
from slime.sessions.limits import ABORTS, DONE, LIMITS, NO_REQUEST, SessionLimits
from slime.sessions.live import LiveAnswer, ShownTokens, TextSoFar
from slime.sessions.messages import ChatParser, ChatRequest, ModelAnswer, RequestRejected, from_reply
from slime.sessions.off_loop import off_loop
from slime.sessions.parsing import read_reply
from slime.sessions.rendering import BoundaryError, ChatRenderer, Rendered
from slime.sessions.turns import Turn, TurnTree, join_images
from slime.types import Message, Sample, SamplingParams
from slime.vision.requests import RequestImages, request_images

MODEL = "policy"
"""The name of the model that sessions serve."""
_FORBIDDEN = 403
_MOST_ERROR_TEXT = 1000
"""Maximum length in characters of a reason in a sample's metadata."""


class Session:
    """The conversations of one agent. `open_session` and `KeyedSessions.open` create it."""

    def __init__(
        self,
        context: RunContext,
        sample: Sample,
        sampling_params: SamplingParams,
        limits: SessionLimits,
        parser: ChatParser,
        model: str | None = MODEL,
    ) -> None:
        """`model` is the only model name that clients may request. None allows any name."""
        self.id, self.api_key = secrets.token_urlsafe(12), secrets.token_urlsafe(32)
        self.url = ""
        self.ended: str | None = None
        self.detail = ""
        self.wrong_keys = 0
        """Number of requests to the session's address with a wrong key. They do not end the session, because every
        process on this machine can send such requests."""
        self.fault: Exception | None = None
        """An error of the engine or of this project. It ends the run. An agent's errors are not stored here."""
        own = context.run
        self._config, self._own, self._sample = context.config, own, sample
        self._params, self._limits, self._parser = sampling_params, limits, parser
        self._model = model
        self._flags = context.config.rollout
        kwargs = sample.apply_chat_template_kwargs
        self._renderer = ChatRenderer(
            own.tokenizer,
            dict(context.config.data.apply_chat_template_kwargs if kwargs is None else kwargs),
            own.media,
        )
        self._tree = TurnTree()
        self._answers: dict[str, Turn] = {}
        self._requests: Counter[int] = Counter()
        self._in_flight: set[asyncio.Task[ModelAnswer]] = set()
        self._tool_calls = self._mismatches = 0
        self._ignored: set[str] = set()

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's clients. Anthropic's clients need `url`."""
        return f"{self.url}/v1"

    @property
    def model(self) -> str:
        """The policy's name in requests."""
        return MODEL

    @property
    def turns(self) -> int:
        """Number of answers so far."""
        return len(self._tree.turns)

    def end(self, reason: str, detail: str = "") -> None:
        """Ends the session: rejects new requests and cancels running requests. Only the first reason is recorded."""
        if self.ended is None:
            self.ended, self.detail = reason, detail[:_MOST_ERROR_TEXT]
            for task in self._in_flight:
                if task is not asyncio.current_task():
                    task.cancel()

    def fail(self, error: Exception) -> None:
        """Stores an error of the engine or of this project in `fault`, and ends the session with it."""
        self.fault = error
        self.end("error", f"{type(error).__name__}: {error}")

    def get_messages(self, answer_id: str) -> list[Message]:
        """Returns the conversation up to and with an earlier answer. Raises RequestRejected for an unknown id."""
        if answer_id not in self._answers:
            raise RequestRejected(
                "request", f"previous_response_id must be of this session, got {answer_id!r}; leave it out"
            )
        return self._answers[answer_id].messages

    async def count(self, request: ChatRequest) -> int:
        """Returns the number of tokens of a whole conversation. Raises RequestRejected if it cannot be rendered."""
        context = await self._context(request)
        whole = request.messages, request.tools, context
        return len((await off_loop(request.size, self._renderer.whole, *whole))[0])

    async def answer(self, request: ChatRequest, live: LiveAnswer | None = None) -> ModelAnswer:
        """Returns the model's answer. Raises RequestRejected if the session has ended, or ends with this request.
        Stores any other error in `fault`. `live` gets the text early if the engine and the parser support that."""
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        try:
            return await self._answer(request, live or LiveAnswer())
        except RequestRejected as refusal:
            self.end(refusal.reason, str(refusal))
            raise
        except Exception as error:  # border: `fault` carries the error to the run
            self.fail(error)
            raise RequestRejected("error", self.detail, _FORBIDDEN) from error
        finally:
            self._in_flight.discard(task)

    async def _answer(self, request: ChatRequest, live: LiveAnswer) -> ModelAnswer:
        self._check(request)
        self._ignored |= set(request.ignored)
        context = await self._context(request)
        rendered, parent, added = await self._prompt(request, context)
        prompt = [*(parent.token_ids if parent else ()), *rendered.token_ids]
        params = self._sampling(prompt, request, context)
        live.prompt_tokens = len(prompt)
        began = time.perf_counter()
        media = request_images(join_images(parent, rendered.images))
        result = await self._generate(prompt, media, parent, request, live, params)
        seconds = time.perf_counter() - began
        ended = result.finish_reason == "stop" and result.token_ids[-1] in self._renderer.special
        reply, refusal = await read_reply(self._parser, self._own, request, prompt, result, ended=ended)
        turn = Turn(
            *(parent, added, rendered.token_ids, from_reply(reply), result, ended, _tools_key(request)),
            images=rendered.images,
        )
        self._tree.add(turn)
        self._tool_calls += len(reply.tool_calls)
        answer = ModelAnswer(
            live.id,
            reply,
            "tool_calls" if reply.tool_calls and ended else result.finish_reason,
            len(prompt),
            len(result.token_ids),
            result.cached_tokens,
            live.created,
        )
        self._answers[answer.id] = turn
        index, written = len(self._tree.turns) - 1, len(result.token_ids)
        self._own.events.add(
            "turn",
            session=self.id,
            turn=index,
            prompt_tokens=len(prompt),
            tokens=written,
            seconds=round(seconds, 4),
        )
        if refusal is not None:
            raise refusal
        return answer

    def _check(self, request: ChatRequest) -> None:
        """Raises RequestRejected if the session has ended, has used up a limit, or cannot answer this request."""
        limits, written = self._limits, sum(len(turn.result.token_ids) for turn in self._tree.turns)
        if self.ended is not None:
            detail = f"the session has ended: {self.ended}. {self.detail}"
            raise RequestRejected(self.ended, detail, _FORBIDDEN)
        if self._own.aborted:
            raise RequestRejected("aborted", "the rollout has all samples that it needs", _FORBIDDEN)
        for name, used, limit in (
            ("turns", len(self._tree.turns) + len(self._in_flight) - 1, limits.turns),
            ("tokens", written, limits.tokens),
            ("tool_calls", self._tool_calls - 1, limits.tool_calls),
        ):
            if limit is not None and used >= limit:
                raise RequestRejected(
                    name, f"the session may have {limit} {name}, which are used up", _FORBIDDEN
                )
        if self._model is not None and request.model != self._model:
            detail = f"the model must be {self._model}, got {request.model!r}; ask for session.model"
            raise RequestRejected("model", detail, 404)
        if not request.messages or request.messages[-1]["role"] == "assistant":
            last = request.messages[-1]["role"] if request.messages else "no message"
            detail = f"the last message must be of a user or a tool, got {last}; end the messages with one"
            raise RequestRejected("request", detail)
        if request.tools and not self._parser.tools:
            raise RequestRejected(
                "no_tool_parser",
                "tools must have a parser of the model's tool calls, got none; give its name with the tool-call-parser "
                "flag of the engine's backend",
            )

    async def _context(self, request: ChatRequest) -> int | None:
        """Returns the maximum number of tokens of a prompt and its answer together, or None without a limit. Raises
        RequestRejected if the request has more messages than this number."""
        try:
            served = await self._own.context_tokens()
        except TimeoutError as error:
            raise self._late(error) from error
        own = self._params.get("max_context_len", self._flags.rollout_max_context_len)
        limits = own, served, self._own.context[0]
        context = min((tokens for tokens in limits if tokens is not None), default=None)
        if context is not None and len(request.messages) > context:
            detail = f"the context length is {context} tokens, got {len(request.messages)} messages"
            raise RequestRejected("context", detail)
        return context

    def _late(self, error: TimeoutError) -> RequestRejected:
        detail = str(error) or "the engine did not answer"
        self._own.timed_out[random_stream(self._sample)] = detail
        return RequestRejected("deadline", detail, _FORBIDDEN)

    async def _prompt(
        self, request: ChatRequest, context: int | None
    ) -> tuple[Rendered, Turn | None, list[Message]]:
        """Returns the new tokens, the turn that they continue, and the messages that are not in this turn's path."""
        turn, known = self._tree.last_known(request.messages, _tools_key(request))
        if turn is not None:
            added = request.messages[known:]
            last = turn.result.token_ids[-1] if turn.ended else None
            asked = turn.messages, added, request.tools, last, context
            try:
                return await off_loop(request.size, self._renderer.following, *asked), turn, added
            except BoundaryError:
                self._mismatches += 1
        self._own.chat_remarks.look(request.messages, request.tools, self._renderer.options)
        whole = request.messages, request.tools, context
        return await off_loop(request.size, self._renderer.whole, *whole), None, request.messages

    async def _generate(
        self,
        prompt: list[int],
        media: RequestImages,
        parent: Turn | None,
        request: ChatRequest,
        live: LiveAnswer,
        params: SamplingParams,
    ) -> GenerateResult:
        engine = self._own.engine
        assert engine is not None, "a session needs an engine"
        wanted = columns.wanted(self._config, lambda column: parent.known(column.name) if parent else 0)
        shown: ShownTokens = {}
        if request.stream and engine.streams and getattr(self._parser, "plain", False):
            hold = max(map(len, request.stop), default=0)
            live.show(TextSoFar(self._own.tokenizer, self._renderer.special, hold))
            shown = {"on_tokens": live.on_tokens}
        stream = random_stream(self._sample)
        index = parent.generated if parent else 0
        seed = request_seed(self._flags.rollout_seed, stream, index, retry=self._requests[index])
        self._requests[index] += 1
        deadline_s = self._flags.rollout_deadline_s
        began = time.perf_counter()
        try:
            async with asyncio.timeout(deadline_s * 1.1 + 0.5):
                result = await engine.generate(
                    *(prompt, params),
                    **media,
                    **shown,
                    seed=seed,
                    deadline_s=deadline_s,
                    session=self.id,
                    columns=wanted,
                )
        except TimeoutError as error:
            raise self._late(error) from error
        except ValueError as error:
            raise RequestRejected("engine", str(error)) from error
        columns.check_answer(self._sample, result, wanted, params)
        if not stream.startswith(EVALUATION):
            self._own.note_request(time.perf_counter() - began, result)
        if result.finish_reason == "abort" or not result.token_ids:
            raise RequestRejected("aborted", "the rollout has all samples that it needs", _FORBIDDEN)
        live.check(result)
        return result

    def _sampling(self, prompt: list[int], request: ChatRequest, context: int | None) -> SamplingParams:
        """Returns the run's sampling parameters, with the client's stop texts added. The maximum length is the smallest
        of the run's, the client's, the session's and the context's limits."""
        params = {name: value for name, value in self._params.items() if name != "max_context_len"}
        note_sampling(self._flags, self._sample, params)
        written = sum(len(turn.result.token_ids) for turn in self._tree.turns)
        rest = None if context is None else context - len(prompt)
        if rest is not None and rest <= 0:
            raise RequestRejected(
                "context", f"the context length is {context} tokens, got a prompt of {len(prompt)}"
            )
        left = None if self._limits.tokens is None else self._limits.tokens - written
        lengths = [n for n in (params.get("max_new_tokens"), request.max_tokens, left, rest) if n is not None]
        if not lengths:
            raise ValueError(
                "--rollout-max-response-len must be set, got none; or give --rollout-max-context-len"
            )
        own = params.get("stop") or []
        stop = [*([own] if isinstance(own, str) else own), *request.stop]
        return params | {"max_new_tokens": min(lengths), "stop": stop or None}

    def adopt(self, sample: Sample) -> None:
        """Replaces the sample with which the session was opened. `samples` then copies the fields of `sample`."""
        opened, self._sample = self._sample, sample
        sample.metadata = {**(sample.metadata or {}), **opened.metadata}
        if (detail := self._own.timed_out.pop(random_stream(opened), None)) is not None:
            self._own.timed_out[random_stream(sample)] = detail

    def samples(self, reward: float | None = None) -> list[Sample]:
        """Ends the session and returns one sample per conversation, in the order of the conversations' last turns.

        A session without an answer returns one sample, which is not trained on or which the rollout draws again. All
        samples get `reward`. Without `reward`, the run's reward function scores the samples together. If `reward` is
        not finite, it is 0, and no sample is trained on. `metadata["session"]` of the first has the end's reason.
        """
        if reward is not None and not math.isfinite(reward):
            if self.ended not in ABORTS:
                detail = f"a reward must be a finite number, got {reward}; check the agent's reward"
                self.ended, self.detail = "reward", detail
            reward = 0.0
        self.end(DONE)
        if self.ended == DONE and not self._tree.turns:
            self.ended, self.detail = NO_REQUEST, self._describe_unused()
        assert self.ended is not None
        found = [] if self.ended in ABORTS else self._tree.samples(self._sample)
        skip = self._flags.rollout_skip_special_tokens
        for sample, leaf in found:
            ids = sample.tokens[-sample.response_length :]
            sample.response = str(self._own.tokenizer.decode(ids, skip_special_tokens=skip))
            sample.status = self._status(leaf)
            failed = sample.status is Sample.Status.FAILED
            sample.remove_sample = sample.remove_sample or failed or not any(sample.loss_mask or [])
            sample.reward = reward
        made = [sample for sample, _ in found] or [self._without_answer(reward)]
        for sample in made:
            if sample.status is Sample.Status.FAILED:
                sample.metadata[REMOVED] = {"reason": self.ended, "said": self.detail}
        made[0].metadata[KEY] = SessionRecord(
            ended=self.ended,
            said=self.detail,
            turns=self.turns,
            tool_calls=self._tool_calls,
            samples=len(made),
            prefix_mismatch=self._mismatches,
            ignored=sorted(self._ignored),
        )
        return made

    def _describe_unused(self) -> str:
        """Returns the error text for a session that got no request with its key."""
        others = f", and {self.wrong_keys} with another key" if self.wrong_keys else ""
        return (
            f"an agent must ask for an answer with the key of its session, got none{others}; give its client "
            "session.base_url and session.api_key (Anthropic: session.url)"
        )

    def _status(self, leaf: Turn) -> Sample.Status:
        if self.ended in LIMITS or (self.ended == DONE and leaf.result.finish_reason == "length"):
            return Sample.Status.TRUNCATED
        return Sample.Status.COMPLETED if self.ended == DONE else Sample.Status.FAILED

    def _without_answer(self, reward: float | None) -> Sample:
        """Returns the sample without an answer: one response token without training, or none after an abort."""
        sample = blank(self._sample)
        sample.reward = reward
        if self.ended in ABORTS:
            sample.status, sample.reward = Sample.Status.ABORTED, None
            return sample
        sample.tokens = self._own.prompt_ids(sample)
        end = self._own.tokenizer.eos_token_id
        sample.append_response_tokens(tokens=[0 if end is None else end], trainable=False)
        sample.status, sample.remove_sample = Sample.Status.FAILED, True
        return sample

    def reward(self, value: float) -> None:
        """Sets the newest turn's reward for --advantage-estimator grpo_turn. A sample's `metadata["turn_rewards"]` has
        the rewards of all turns that the sample trains on. A turn without a reward has the reward 0."""
        if not self._tree.turns:
            raise ValueError(
                "a turn must be there before it gets a reward, got a session without an answer; ask first"
            )
        self._tree.turns[-1].reward = float(value)


def _tools_key(request: ChatRequest) -> str:
    return json.dumps(request.tools, sort_keys=True) if request.tools else ""
