"""Requests completions through the router: slime's RolloutEngine over vLLM's /v1/completions.

Owns the translation of sampling parameters, the retries until a deadline, and the check that every token has a
log-prob. The client can be pickled, because it opens its HTTP session only at the first request.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec

from slime.divergence import DivergedError
from slime.protocols import GenerateResult
from vime.engine import compact_log_probs, routed_experts
from vime.engine.middleware import VERSIONS_HEADER
from vime.engine.server import SERVED_MODEL_NAME

# slime's name -> vLLM's name. Any other parameter is an error, because dropping it would change the sampling.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "ignore_eos": "ignore_eos",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_TRANSIENT_STATUS = {408, 425, 429}
_FINISH = {"stop": "stop", "length": "length", "abort": "abort"}


class _Transient(Exception):
    """A fault that a retry may fix."""


class VllmEngineClient:
    """RolloutEngine over vllm-router at `router_url`, e.g. "http://127.0.0.1:3000"."""

    def __init__(self, router_url: str, run_key: str) -> None:
        self.router_url = router_url
        self._run_key = run_key
        self._session: aiohttp.ClientSession | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        seed: int,
        deadline_s: float,
        experts_from: int | None = None,
    ) -> GenerateResult:
        """Sample one completion of `token_ids`.

        The log-probs are in nats. They belong to the distribution that the tokens were sampled from: after temperature,
        and after top-k, top-p, min-p and penalties if these are set. The same seed gives the same sample on the same
        weights, if the engine's numbers do not depend on its batch. The text keeps the stop string unless
        `no_stop_trim` is False.

        Connection faults and HTTP 5xx, 408, 425 and 429 are retried. TimeoutError when `deadline_s` seconds
        (--rollout-deadline-s) end without a completion. ValueError, with the engine's answer, for any other status.
        """
        body = request_body(token_ids, sampling_params, seed)
        if experts_from is not None:
            body[routed_experts.START_FIELD] = experts_from
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        pause_s, last = _FIRST_PAUSE_S, "no attempt"
        while (left_s := end - loop.time()) > 0:
            try:
                return await self._complete(body, left_s)
            except (_Transient, aiohttp.ClientError, TimeoutError, OSError) as error:
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(min(pause_s, max(end - loop.time(), 0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise TimeoutError(
            f"an engine must answer within --rollout-deadline-s {deadline_s:g}, got no completion of a prompt of "
            f"{len(token_ids)} tokens; the last fault was {last}"
        )

    async def abort_all(self) -> None:
        """Abort every running request on every engine of the router. Each request returns the tokens that it has."""
        listed = await self._json("GET", "/workers")
        urls = [worker["url"] for worker in listed["workers"]]
        results = await asyncio.gather(
            *(self._json("POST", f"{url}/abort_requests", {}) for url in urls), return_exceptions=True
        )
        for result in results:
            # A dead engine has nothing to abort: its requests fail, and `generate` retries them until their deadline.
            if isinstance(result, BaseException) and not isinstance(result, aiohttp.ClientError | OSError):
                raise result

    async def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._run_key}"},
                # The callers limit how many requests run. A second limit would only keep requests from the engine.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
            )
        return self._session

    async def _json(self, method: str, url: str, body: Any = None) -> Any:
        url = url if url.startswith("http") else self.router_url + url
        timeout = aiohttp.ClientTimeout(total=30)
        async with self._connections().request(method, url, json=body, timeout=timeout) as response:
            if response.status != 200:
                raise RuntimeError(f"{url} must answer, got HTTP {response.status}: {await response.text()}")
            return await response.json(content_type=None)

    async def _complete(self, body: dict[str, Any], timeout_s: float) -> GenerateResult:
        url = f"{self.router_url}/v1/completions"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._connections().post(url, json=body, timeout=timeout) as response:
            if response.status != 200:
                said = f"HTTP {response.status}: {(await response.text())[:1000]}"
                if response.status >= 500 or response.status in _TRANSIENT_STATUS:
                    raise _Transient(said)
                raise ValueError(f"the engine must accept the request, got {said}")
            versions = response.headers[VERSIONS_HEADER]
            answer = _decoded(await response.read(), url)
        result = parse_completion(answer, versions)
        start = body.get(routed_experts.START_FIELD)
        if start is None or not result.token_ids:  # no tokens: the request was aborted in the queue
            return result
        tokens = len(body["prompt"]) + len(result.token_ids)
        rows = routed_experts.decode(answer["choices"][0].get("routed_experts"), tokens=tokens, start=start)
        return replace(result, routed_experts=rows)


def request_body(token_ids: list[int], sampling_params: dict[str, Any], seed: int) -> dict[str, Any]:
    """The body of a /v1/completions request. For a parameter that is None, the engine uses its neutral default."""
    unknown = sampling_params.keys() - _NAMES.keys()
    if unknown:
        raise ValueError(f"sampling parameters must be among {sorted(_NAMES)}, got {sorted(unknown)}")
    given = {_NAMES[name]: value for name, value in sampling_params.items() if value is not None}
    return {
        "include_stop_str_in_output": True,
        **given,
        "model": SERVED_MODEL_NAME,
        "prompt": token_ids,
        "seed": seed,
        **compact_log_probs.REQUEST,
        "return_token_ids": True,
    }


def _decoded(answer: bytes, url: str) -> Any:
    """Parse an answer. Text that is not JSON comes from a server in between, so a retry may fix the fault."""
    try:
        return msgspec.json.decode(answer)
    except msgspec.DecodeError as error:
        raise _Transient(f"{url} must answer with JSON, got {error}: {answer[:200]!r}") from error


def parse_completion(answer: dict[str, Any], versions: str) -> GenerateResult:
    """Convert vLLM's answer. ValueError when a token has no log-prob, or when the finish reason is unknown.
    DivergedError when a log-prob is NaN."""
    choice = answer["choices"][0]
    token_ids = choice["token_ids"]
    log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if len(token_ids) != len(log_probs) or None in log_probs:
        raise ValueError(
            f"the engine must give one log-prob per token, got {len(log_probs)} for {len(token_ids)} tokens; "
            f"check that it runs with --logprobs-mode processed_logprobs"
        )
    live = [int(version) for version in versions.split(",")]
    if compact_log_probs.NOT_A_NUMBER in log_probs:
        position = log_probs.index(compact_log_probs.NOT_A_NUMBER)
        trained = "the first weights" if live[-1] < 1 else f"the weights after rollout {live[-1] - 1}"
        raise DivergedError(
            f"log-probs of the engine must be finite, got nan at token {position} of a response with {trained}",
            live[-1] - 1,
        )
    if choice["finish_reason"] not in _FINISH:
        raise ValueError(f"finish_reason must be one of {sorted(_FINISH)}, got {choice['finish_reason']!r}")
    usage = answer.get("usage") or {}
    timing = answer.get("metrics") or {}  # present with --enable-per-request-metrics; entries may be None
    queue_ms, between_tokens_ms = timing.get("queue_time_ms"), timing.get("mean_itl_ms")
    return GenerateResult(
        token_ids=token_ids,
        log_probs=log_probs,
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        weight_versions=live,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        queue_s=None if queue_ms is None else queue_ms / 1e3,
        decode_tokens_per_s=1e3 / between_tokens_ms if between_tokens_ms else None,
    )
