"""JSON over HTTP for user hooks (generate functions, tools). Owns retries, the deadline, and the run's key.

This module adds the run's key to requests to the run's own router and engines, once the server has proved itself
(slime.peers.proof). Requests to other servers never have the key.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from slime.event_loop import loop_objects
from slime.peers.proven_connector import ProvenConnector, RunKey
from slime.system.waiting import log_unanswered
from slime.types import Json

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_TRANSIENT_STATUS = {408, 425, 429}
_LOOK_S = 30.0
_CONNECT_S = 10.0
"""Time limit of a connection. A host that drops packets counts as a host that refuses: the fault is logged, and the
next attempt begins."""


@dataclass
class OwnServers:
    """The servers of one model of this run, and the headers with the key for them."""

    urls: Sequence[str] = ()
    """The servers' addresses."""
    headers: Mapping[str, str] = field(default_factory=dict)
    workers: str = ""
    """A URL that answers with the engines' addresses, as {"urls": [...]} or {"workers": [{"url": ...}]}. The addresses
    change when an engine restarts."""
    worker_path: str = ""
    """The beginning of the path in the engines' URLs. Only for such a URL is a request sent to `workers`."""
    held: bool = False
    """True if the run itself started the servers at `urls`, see `slime.peers.proof.require_proof`."""

    def __post_init__(self) -> None:
        self._known = self._first = {_origin(url) for url in self.urls}

    async def headers_for(self, session: aiohttp.ClientSession, url: str) -> Mapping[str, str]:
        """Returns `headers` if `url` is one of the run's servers, else an empty mapping."""
        origin = _origin(url)
        if origin not in self._known and self.worker_path and urlsplit(url).path.startswith(self.worker_path):
            timeout = aiohttp.ClientTimeout(total=_LOOK_S)
            async with session.get(self.workers, headers=self.headers, timeout=timeout) as response:
                response.raise_for_status()
                listed = await response.json(content_type=None)
            self._known = self._first | {_origin(url) for url in _urls(listed)}
        return self.headers if origin in self._known else {}

    def key_for(self, request: aiohttp.ClientRequest) -> RunKey | None:
        """Returns the run's key if the request has it, else None."""
        value = self.headers.get("Authorization")
        if value is None or request.headers.get("Authorization") != value:
            return None
        return RunKey(value.removeprefix("Bearer "), self.held and _origin(str(request.url)) in self._first)


def _urls(listed: dict[str, Any]) -> list[str]:
    if "urls" in listed:
        return list(listed["urls"])
    return [worker["url"] for worker in listed["workers"]]


_own: tuple[OwnServers, ...] = ()


def set_own_servers(*own: OwnServers) -> None:
    """Sets the run's servers, one for each model. From now on, requests of this process to `own` carry the model's key,
    and any library reaches `own` directly."""
    global _own
    _own = own
    urls = [url for each in own for url in each.urls]
    bypass_proxy(os.environ, (host for url in urls if (host := urlsplit(url).hostname)))


def bypass_proxy(environ: MutableMapping[str, str], hosts: Iterable[str]) -> None:
    """Lets requests to `hosts` go there directly, also with http_proxy. Libraries read one spelling or the other."""
    known = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")
    listed = list(dict.fromkeys([*(host.strip() for host in known if host.strip()), *hosts]))
    environ["no_proxy"] = environ["NO_PROXY"] = ",".join(listed)


def get_host_info() -> tuple[str, str]:
    """Returns this host's name and IPv4 address, for a server that a plug-in starts. The address belongs to the
    interface that leads out, and is 127.0.0.1 on a host without one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737): only the route is looked up
        except OSError:
            return socket.gethostname(), "127.0.0.1"
        return socket.gethostname(), probe.getsockname()[0]


def get_current_node_ip() -> str:
    """Returns the address of `get_host_info`."""
    return get_host_info()[1]


async def post(
    url: str,
    payload: object,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
    *,
    deadline_s: float = 600.0,
) -> Json:
    """Sends `payload` as JSON in a POST request, and returns the JSON of the reply.

    A URL of the run's own router or engines gets the run's key, unless `headers` have one. Connection errors and status
    408, 425, 429 and 5xx are retried with growing pauses. Raises TimeoutError after `max_retries` retries or
    `deadline_s` seconds. Any other status than 2xx, or a reply that is not JSON, raises ValueError without a retry.
    """
    return await _request("POST", url, {"json": payload}, max_retries, headers, deadline_s)


async def get(
    url: str,
    payload: Mapping[str, object] | None = None,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
    *,
    deadline_s: float = 600.0,
) -> Json:
    """Sends a GET request with `payload` as its query, and returns the reply's JSON. Key, retries and errors are those
    of `post`."""
    return await _request("GET", url, {"params": payload}, max_retries, headers, deadline_s)


async def _request(
    method: str,
    url: str,
    content: Mapping[str, Any],
    max_retries: int,
    headers: Mapping[str, str] | None,
    deadline_s: float,
) -> Json:
    if (objects := loop_objects()).closes:
        session = objects.get(_request, _get_session, aiohttp.ClientSession.close)
        return await _try(session, method, url, content, max_retries, headers or {}, deadline_s)
    async with aiohttp.ClientSession(connector=ProvenConnector(_find_key)) as session:
        return await _try(session, method, url, content, max_retries, headers or {}, deadline_s)


def _get_session() -> aiohttp.ClientSession:
    """Makes the HTTP client of an event loop, whose connections stay open between requests."""
    return aiohttp.ClientSession(connector=ProvenConnector(_find_key, limit=0, keepalive_timeout=60))


def _find_key(request: aiohttp.ClientRequest) -> RunKey | None:
    return next(filter(None, (each.key_for(request) for each in _own)), None)


async def _try(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    content: Mapping[str, Any],
    max_retries: int,
    headers: Mapping[str, str],
    deadline_s: float,
) -> Json:
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    for attempt in range(1, max_retries + 2):
        try:
            own: Mapping[str, str] = {}
            for each in _own:
                own = own or await each.headers_for(session, url)
            # A redirect must not carry the run's key to another server.
            sent = {**content, "headers": {**own, **headers}, "allow_redirects": not own}
            return await _once(session, method, url, sent, end - loop.time())
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            pause_s = min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
            if attempt > max_retries or loop.time() + pause_s >= end:
                raise TimeoutError(
                    f"{url} must answer within {deadline_s:g} s and {max_retries} retries, got "
                    f"{attempt} failed attempts; the last one with {type(error).__name__}: {error}"
                ) from error
            fault = f"{type(error).__name__}: {error}"
            log_unanswered(_shown(url), fault, f"{deadline_s:g} s and {max_retries} retries are over")
        await asyncio.sleep(pause_s)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _once(
    session: aiohttp.ClientSession, method: str, url: str, content: Mapping[str, Any], left_s: float
) -> Json:
    timeout = aiohttp.ClientTimeout(total=max(left_s, 0.001), sock_connect=_CONNECT_S)
    async with session.request(method, url, timeout=timeout, **content) as response:
        text = await response.text()
        if response.status >= 500 or response.status in _TRANSIENT_STATUS:
            raise ConnectionError(f"HTTP {response.status}: {text[:200]}")
        if response.status >= 300:
            raise ValueError(f"{url} must accept the request, got HTTP {response.status}: {text[:500]}")
    try:
        reply: Json = json.loads(text)
        return reply
    except json.JSONDecodeError as error:
        raise ValueError(f"{url} must answer in JSON, got {text[:200]!r}") from error


def _shown(url: str) -> str:
    """Returns the URL without login and query, which may hold a key."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
