"""The `remote_rm` reward sends the response to a server that scores it (`--rm-url`)."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
from yarl import URL

from slime.config.schema import Config
from slime.event_loop import loop_objects
from slime.system.waiting import log_unanswered
from slime.types import Reward, Sample

_MAX_CONNECTIONS = 64
_ATTEMPT_TIMEOUT_S, _CONNECT_S = 120.0, 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_TRANSIENT_STATUS = {408, 425, 429}


class _ServerBusy(Exception):
    """The server responded that a later attempt may succeed."""


async def remote_reward(c: Config, sample: Sample) -> Reward:
    """Posts {"prompt", "response", "label", "metadata"} as JSON. The reply (a number or object) is the reward.

    Connection errors and status 408, 425, 429 and 5xx are logged and retried with growing pauses. Raises TimeoutError
    after `--rollout-deadline-s` seconds. Any other status, or a reply that is not JSON, raises ValueError without a
    retry. At most 64 requests are open at a time. The deadline starts when the request is one of the 64.
    """
    url = URL(c.reward.rm_url or "")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"--rm-url must be an http or https address for remote_rm, got {c.reward.rm_url!r}")
    shown = url.with_user(None).with_query(
        None
    )  # errors print this URL, because the full URL can contain credentials
    body: dict[str, object] = {
        key: getattr(sample, key) for key in ("prompt", "response", "label", "metadata")
    }
    loop = asyncio.get_running_loop()
    slot = loop_objects().semaphore(remote_reward, _MAX_CONNECTIONS)
    async with slot, aiohttp.ClientSession() as session:
        limit = c.rollout.rollout_deadline_s
        deadline = loop.time() + limit
        attempt = 0
        while True:
            attempt += 1
            try:
                return await _post(session, url, shown, body, min(_ATTEMPT_TIMEOUT_S, deadline - loop.time()))
            except (aiohttp.ClientError, TimeoutError, _ServerBusy) as error:
                # Random pauses keep the requests of a batch from retrying at the same time.
                pause_s = min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
                pause_s *= random.uniform(0.5, 1.0)
                if loop.time() + pause_s >= deadline:
                    raise TimeoutError(
                        f"--rm-url {shown} must answer within --rollout-deadline-s "
                        f"{limit:g}, got no reward in {attempt} attempts; "
                        f"the last one ended in {type(error).__name__}: {error}"
                    ) from error
                fault = str(error) if isinstance(error, _ServerBusy) else f"{type(error).__name__}: {error}"
                log_unanswered(f"--rm-url {shown}", fault, f"--rollout-deadline-s {limit:g}")
            await asyncio.sleep(pause_s)


async def _post(
    session: aiohttp.ClientSession, url: URL, shown: URL, body: dict[str, object], timeout_s: float
) -> Reward:
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
    async with session.post(url, json=body, timeout=timeout) as response:
        text = await response.text()
        if response.status >= 500 or response.status in _TRANSIENT_STATUS:
            raise _ServerBusy(f"HTTP {response.status}: {text[:200]}")
        if response.status != 200:
            raise ValueError(f"--rm-url {shown} must answer 200, got {response.status}: {text[:200]}")
    try:
        reply: Reward = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--rm-url {shown} must answer in JSON, got {text[:200]!r}") from error
    return reply
