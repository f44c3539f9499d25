"""Requests completions through sglang-router: slime's RolloutEngine over SGLang's POST /generate.

This module owns the translation of sampling parameters and the parsing of answers. sglang-router writes each body anew
and drops the fields that its own record lacks, so this module sends only fields of that record.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypedDict

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from slime.protocols import (
    EXPERTS,
    KEPT_TOKENS,
    TOP,
    VERSIONS,
    AnswerParts,
    Arrays,
    FinishReason,
    GenerateResult,
    OnTokens,
    ScoreResult,
)
from slime.rollout.sampling import checked
from vime.pool.router_client import RouterClient, Transient, check_start, require_finite, require_ok, scored
from vime.sglang.control import UNNAMED, parse_version

if TYPE_CHECKING:
    from slime.vision.inputs import ImageInputs

PARAMETERS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_new_tokens",
        "min_new_tokens",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        "no_stop_trim",
        "ignore_eos",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    }
)
"""The sampling parameters that sglang-router passes on. SGLang and slime use the same names."""
_DROPPED = "spaces_between_special_tokens"
"""sglang-router drops this parameter. It changes the text of slow tokenizers only. Fast tokenizers ignore it."""
_WITHOUT = {
    KEPT_TOKENS: "kept tokens must come from vLLM, got a request for SGLang's; leave --replay-kept-tokens out",
    TOP: "the likeliest tokens must come from vLLM, got a request for SGLang's; leave --use-score-centering out",
    EXPERTS: "routed experts must come from vLLM, got a request for SGLang's; sglang-router drops the field: leave "
    "--use-rollout-routing-replay out",
}
"""The error of each column that SGLang's answers lack."""
_FINISH: dict[object, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SglangEngineClient(RouterClient):
    """Implements RolloutEngine over the sglang-router at `router_url`, such as "http://127.0.0.1:3000"."""

    streams = has_parts = False

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: dict[str, object],
        *,
        seed: int,
        deadline_s: float,
        columns: Mapping[str, int] = MappingProxyType({}),
        session: str | None = None,
        on_tokens: OnTokens | None = None,
        parts: AnswerParts | None = None,
        images: ImageInputs | None = None,
    ) -> GenerateResult:
        """Samples one completion of `token_ids`, see `slime.protocols.RolloutEngine`.

        The log-probs are in nats, after temperature, and without top-p, top-k and min-p. With
        --enable-deterministic-inference, the same seed and the same weights give the same sample. Otherwise SGLang
        ignores the seed. The text keeps the stop string unless `no_stop_trim` is False. Faults are handled as in
        `VllmEngineClient.generate`.
        """
        check_no_images(images)
        for name in columns:
            raise ValueError(
                _WITHOUT.get(name)
                or f"{name} must come from vLLM, got a request for SGLang's; take --rollout-backend vllm"
            )
        body = msgspec.json.encode(
            {
                "input_ids": token_ids,
                "sampling_params": {**request_params(sampling_params), "sampling_seed": seed},
                "return_logprob": True,
            }
        )
        answer = await self._until(
            deadline_s, lambda: self._send(body, session), prompt_tokens=len(token_ids)
        )
        return parse_result(answer)

    async def score(
        self,
        token_ids: list[int],
        *,
        start: int,
        top_k: int = 0,
        deadline_s: float,
        images: ImageInputs | None = None,
    ) -> ScoreResult:
        """Returns the log-probs of given tokens, see `slime.protocols.RolloutEngine`. Faults are handled as in
        `VllmEngineClient.generate`."""
        check_no_images(images)
        check_start(start, token_ids)
        asked = {
            "input_ids": token_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # SGLang's first row has no log-prob
            **({"top_logprobs_num": top_k} if top_k else {}),
        }
        body = msgspec.json.encode(asked)
        answer = await self._until(deadline_s, lambda: self._send(body, None), prompt_tokens=len(token_ids))
        return parse_scores(answer, token_ids[start:], top_k)

    async def abort_all(self) -> None:
        """Aborts every running request on every engine of the router, because the router has no route for that."""
        await self._on_all("/abort_request", {"abort_all": True})

    async def _send(self, body: bytes, session: str | None) -> Answer:
        headers = {"Content-Type": "application/json"}
        if session is not None:
            headers["x-smg-routing-key"] = session  # for sglang-router's sticky policies
        try:
            async with self._connections().post(
                f"{self.router_url}/generate", data=body, headers=headers
            ) as response:
                await require_ok(response)
                return msgspec.json.decode(await response.read(), type=Answer)
        except (aiohttp.ClientError, msgspec.DecodeError, OSError) as error:
            raise Transient(f"{type(error).__name__}: {error}") from error


class _VersionSpan(TypedDict):
    """The tokens [start, end) were sampled by the weights `version`."""

    version: str | int
    start: int
    end: int


_Row = tuple[float | None, int, str | None]
"""The log-prob, token id and text of a token. A null log-prob means NaN."""


class _Meta(msgspec.Struct):
    """The field `meta_info` of an answer. The `input_*` lists belong to the prompt, and their first row has no
    log-prob. `weight_versions` has the spans of tokens with their version."""

    finish_reason: dict[str, object]
    output_token_logprobs: list[_Row] = []  # Empty if the request was aborted in the queue.
    input_token_logprobs: list[_Row] = []
    input_top_logprobs: list[list[_Row] | None] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | int = UNNAMED
    weight_versions: list[_VersionSpan] | None = None


class Answer(msgspec.Struct):
    """An answer to POST /generate."""

    text: str
    output_ids: list[int]
    meta_info: _Meta


def check_no_images(images: ImageInputs | None) -> None:
    """Raises ValueError for a request with images."""
    if images is not None:
        raise ValueError(
            f"images must go to vLLM, got {len(images.items)} for SGLang; use --rollout-backend vllm"
        )


def request_params(sampling_params: dict[str, object]) -> dict[str, object]:
    """Returns the field `sampling_params` of a request. For a parameter that is None, the engine uses its neutral
    default."""
    if unknown := sampling_params.keys() - PARAMETERS - {_DROPPED}:
        raise ValueError(f"sampling parameters must be among {sorted(PARAMETERS)}, got {sorted(unknown)}")
    params = {name: value for name, value in checked(sampling_params).items() if name != _DROPPED}
    if "max_new_tokens" not in params:
        raise ValueError(
            "max_new_tokens must be given, got none; SGLang would stop after 128 tokens: set --rollout-max-response-len"
        )
    return {"no_stop_trim": True, **params}


def parse_result(answer: Answer) -> GenerateResult:
    """Converts an engine's answer. Raises `Transient` for a request that the engine gave up for an internal reason,
    ValueError if a token has no log-prob, DivergedError if a log-prob is NaN."""
    meta = answer.meta_info
    reason = meta.finish_reason.get("type")
    if reason not in _FINISH:
        raise ValueError(f"finish_reason must be one of {list(_FINISH)}, got {reason!r}")
    if reason == "abort" and meta.finish_reason.get("status_code") is not None:
        raise Transient(f"the engine gave the request up: {meta.finish_reason}")
    rows = meta.output_token_logprobs
    if [token for _, token, _ in rows] != answer.output_ids:
        raise ValueError(
            f"the engine must give one log-prob per token, got {len(rows)} for {len(answer.output_ids)} tokens; check "
            "that it is SGLang 0.5.23 or newer"
        )
    live, columns = _versions(meta), dict[str, Arrays]()
    if meta.weight_versions:
        ends = [*(span["start"] for span in meta.weight_versions[1:]), len(rows)]
        lengths = [end - span["start"] for span, end in zip(meta.weight_versions, ends, strict=True)]
        columns[VERSIONS] = (np.repeat(np.asarray(live, np.int32), lengths),)
    log_probs = _values(rows)
    require_finite(log_probs, live[-1])
    return GenerateResult(
        token_ids=answer.output_ids,
        log_probs=log_probs.tolist(),
        text=answer.text,
        finish_reason=_FINISH[reason],
        weight_versions=live,
        columns=columns,
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
    )


def parse_scores(answer: Answer, token_ids: list[int], top_k: int) -> ScoreResult:
    """Returns the log-probs of `token_ids`, which are the last tokens of the prompt. Raises errors as `parse_result`
    does."""
    meta, count = answer.meta_info, len(token_ids)
    if meta.finish_reason.get("type") == "abort":
        raise Transient(f"the engine gave the request up: {meta.finish_reason}")
    rows = meta.input_token_logprobs[-count:]
    if [token for _, token, _ in rows] != token_ids:
        raise ValueError(
            f"the engine must score the {count} tokens that it was asked for, got {len(rows)} rows of other tokens; "
            "check that it is SGLang 0.5.23 or newer"
        )
    top = [row for position in meta.input_top_logprobs[-count:] for row in position or ()] if top_k else []
    return scored(
        _values(rows),
        np.array([token for _, token, _ in top], np.int32),
        _values(top),
        _versions(meta),
        (count, top_k),
    )


def _values(rows: list[_Row]) -> npt.NDArray[np.float32]:
    return np.array([np.nan if value is None else value for value, *_ in rows], np.float32)


def _versions(meta: _Meta) -> list[int]:
    """Returns the versions of the weights that sampled the tokens, oldest first."""
    return [parse_version(span["version"]) for span in meta.weight_versions or ()] or [
        parse_version(meta.weight_version)
    ]
