"""JSON over HTTP for user hooks (generate functions, tools). Owns retries and the deadline."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_TRANSIENT_STATUS = {408, 425, 429}


async def post(
    url: str,
    payload: dict[str, Any],
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    *,
    deadline_s: float = 600.0,
) -> Any:
    """POST `payload` as JSON and return the JSON of the reply.

    Connection errors and status 408, 425, 429 and 5xx are retried with growing pauses. TimeoutError after
    `max_retries` retries or `deadline_s` seconds. Any other status than 2xx, or a reply that is not JSON, raises
    ValueError without a retry. The run's own servers need the run's key: pass it in `headers`.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    async with aiohttp.ClientSession(headers=headers) as session:
        for attempt in range(1, max_retries + 2):
            try:
                return await _post_once(session, url, payload, max(end - loop.time(), 0.001))
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                pause_s = min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
                if attempt > max_retries or loop.time() + pause_s >= end:
                    raise TimeoutError(
                        f"{url} must answer within {deadline_s:g} s and {max_retries} retries, got "
                        f"{attempt} failed attempts; the last one with {type(error).__name__}: {error}"
                    ) from error
            await asyncio.sleep(pause_s)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _post_once(
    session: aiohttp.ClientSession, url: str, payload: dict[str, Any], timeout_s: float
) -> Any:
    async with session.post(url, json=payload, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
        text = await response.text()
        if response.status >= 500 or response.status in _TRANSIENT_STATUS:
            raise ConnectionError(f"HTTP {response.status}: {text[:200]}")
        if not response.ok:
            raise ValueError(f"{url} must accept the request, got HTTP {response.status}: {text[:500]}")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{url} must answer in JSON, got {text[:200]!r}") from error
