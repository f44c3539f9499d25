"""The base of the routers' clients: one HTTP session with the run's key, and retries until a deadline.

A client can be pickled, because it opens its session only at the first request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import aiohttp
import numpy as np
import numpy.typing as npt

from slime.checkpoints.divergence import DivergedError
from slime.peers.proven_connector import ProvenConnector, RunKey
from slime.protocols import ScoreResult
from slime.system.waiting import log_unanswered

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_TRANSIENT_STATUS = {408, 425, 429}
_CONTROL_S = 30.0
_LOG_AFTER_S = 10.0
"""Seconds without an answer before the client logs it. A restarting engine, which the pool logs, answers earlier."""

T = TypeVar("T")


class Transient(Exception):
    """A fault that a retry may fix."""


async def require_ok(response: aiohttp.ClientResponse) -> None:
    """Raises `Transient` for HTTP 5xx, 408, 425 and 429, and ValueError with the answer for any other status than
    200."""
    if response.status == 200:
        return
    detail = f"HTTP {response.status}: {(await response.text())[:1000]}"
    if response.status >= 500 or response.status in _TRANSIENT_STATUS:
        raise Transient(detail)
    raise ValueError(f"the engine must accept the request, got {detail}")


def require_finite(log_probs: npt.NDArray[np.float32], version: int) -> None:
    """Raises DivergedError if a log-prob is NaN. `version` is the weight version that generated the last token."""
    if not (bad := np.isnan(log_probs)).any():
        return
    trained = "the first weights" if version < 1 else f"the weights after rollout {version - 1}"
    raise DivergedError(
        f"log-probs of the engine must be finite, got nan at token {int(bad.argmax())} of a response with {trained}",
        version - 1,
    )


def check_start(start: int, token_ids: list[int]) -> None:
    """Checks that `start`, the first position of a request for log-probs, has a token before it. Raises ValueError."""
    if not 1 <= start < len(token_ids):
        raise ValueError(
            f"start must lie in [1, {len(token_ids)}), got {start} for {len(token_ids)} tokens; nothing predicts the "
            "first token"
        )


def scored(
    log_probs: npt.NDArray[np.float32],
    top_ids: npt.NDArray[np.int32],
    top_log_probs: npt.NDArray[np.float32],
    versions: list[int],
    shape: tuple[int, int],
) -> ScoreResult:
    """Makes the result from flat arrays, for `shape` (positions, most probable tokens per position). Raises ValueError
    if values are missing, and DivergedError if a log-prob is NaN."""
    tokens, top_k = shape
    if (len(log_probs), len(top_ids), len(top_log_probs)) != (tokens, tokens * top_k, tokens * top_k):
        raise ValueError(
            f"the engine must give log-probs of {tokens} tokens and of {top_k} most probable ones at each position, "
            f"got {len(log_probs)} and {len(top_ids)} in all; it may serve fewer than {top_k} tokens"
        )
    require_finite(log_probs, versions[-1])
    top = (top_ids.reshape(shape), top_log_probs.reshape(shape)) if top_k else None
    return ScoreResult(log_probs, top, versions)


class RouterClient:
    """A base class that sends requests through the router at `router_url`, for example "http://127.0.0.1:3000"."""

    def __init__(self, router_url: str, run_key: str, *, held: bool = False) -> None:
        """Stores the router's URL and key. With `held`, this run started the router, see
        `slime.peers.proof.require_proof`."""
        self.router_url, self._held = router_url, held
        self._run_key = run_key
        self._session: aiohttp.ClientSession | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_session": None}

    async def close(self) -> None:
        """Closes the connections. The next request opens new connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._run_key}"},
                # The callers limit how many requests run. A second limit would only keep requests from the engine.
                connector=ProvenConnector(self._proof_key, limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
            )
        return self._session

    def _proof_key(self, request: aiohttp.ClientRequest) -> RunKey:
        return RunKey(self._run_key, self._held and str(request.url.origin()) == self.router_url)

    async def _request(
        self, method: str, url: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Sends a control request and returns the answer. Raises RuntimeError for another status than 200."""
        url = url if url.startswith("http") else self.router_url + url
        timeout = aiohttp.ClientTimeout(total=_CONTROL_S)
        sent = self._connections().request(method, url, json=body, headers=headers, timeout=timeout)
        async with sent as response:
            if response.status != 200:
                raise RuntimeError(f"{url} must answer, got HTTP {response.status}: {await response.text()}")
            return await response.read()

    async def _on_all(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> None:
        """Sends a POST of `body` to `path` of every engine of the router. It ignores dead engines, whose requests fail;
        `_until` retries such requests until their deadline."""
        listed = json.loads(await self._request("GET", "/workers"))
        urls = [worker["url"] for worker in listed["workers"]]
        results = await asyncio.gather(
            *(self._request("POST", url + path, body, headers) for url in urls), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, aiohttp.ClientError | OSError):
                raise result

    async def context_tokens(self, deadline_s: float) -> int:
        """Returns the smallest context length of all engines in tokens, see `slime.protocols.RolloutEngine`."""
        return await self._until(deadline_s, self._ask_context, prompt_tokens=0)

    async def _ask_context(self) -> int:
        try:
            listed = json.loads(await self._request("GET", "/workers"))
            urls = [worker["url"] for worker in listed["workers"]]
            cards = await asyncio.gather(*(self._request("GET", url + "/v1/models") for url in urls))
        except (RuntimeError, aiohttp.ClientError, OSError) as error:
            raise Transient(f"{type(error).__name__}: {error}") from error
        if not cards:
            raise Transient("the router has no engine")
        return min(int(json.loads(card)["data"][0]["max_model_len"]) for card in cards)

    async def _until(
        self, deadline_s: float, attempt: Callable[[], Awaitable[T]], *, prompt_tokens: int
    ) -> T:
        """Returns the result of `attempt`, and calls it again after a `Transient`. Raises TimeoutError if `deadline_s`
        seconds (--rollout-deadline-s) pass without an answer."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        end = began + deadline_s
        pause_s, last = _FIRST_PAUSE_S, "no attempt"
        while (left_s := end - loop.time()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    return await attempt()
            except Transient as error:
                last = str(error)
            except TimeoutError:
                last = f"no answer within {left_s:g} s"
            if loop.time() - began > _LOG_AFTER_S:
                log_unanswered(self.router_url, last, f"--rollout-deadline-s {deadline_s:g}")
            await asyncio.sleep(min(pause_s, max(end - loop.time(), 0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise TimeoutError(
            f"an engine must answer within --rollout-deadline-s {deadline_s:g}, got no completion of a prompt of "
            f"{prompt_tokens} tokens; the last fault was {last}"
        )
