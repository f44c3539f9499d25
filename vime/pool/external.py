"""Handles external engines and routers, which a user starts outside the run: addresses, key, and checks before a run.

`vime serve engine` and `vime serve router` start them with the flags of the run. They keep running after the run. The
servers and the run read the run's key from VIME_RUN_KEY, so the key is never on a command line.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any, TypedDict
from urllib.parse import urlsplit

from slime.config import Config
from slime.peers.proof import NotProvenError, is_strangers
from slime.records.errors import FlagError
from vime.pool.asgi import KEY_VARIABLE
from vime.pool.control import ControlError, MakeControl, answers, request
from vime.pool.engine_server import EngineSpec
from vime.pool.process import accepts

ENGINES, ROUTER = "--rollout-external-engine-addrs", "--vllm-router-ip and --vllm-router-port"
LEAST_KEY = 32
_ANSWER_S = 5.0
_POLL_S = 0.5


class Address(TypedDict):
    """The host and the port of a server."""

    host: str
    port: int


def uses(config: Config) -> bool:
    """Returns True if the run uses an external engine or router."""
    return bool(config.rollout.rollout_external_engine_addrs or config.engine.router_ip)


def read_run_key() -> str:
    """Returns the run's key from VIME_RUN_KEY. Raises ValueError if it is missing or too short."""
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < LEAST_KEY:
        raise ValueError(
            f"{KEY_VARIABLE} must hold the key of the external servers, at least {LEAST_KEY} "
            f"characters, got {len(key)}; export {KEY_VARIABLE}=$(openssl rand -hex 32) for them and for the run"
        )
    return key


def resolve_run_key(config: Config) -> str:
    """Returns the run's key: VIME_RUN_KEY if it is set or external servers need it, else a new random key."""
    return read_run_key() if uses(config) or KEY_VARIABLE in os.environ else secrets.token_hex(32)


def split(address: str, typed: str) -> Address:
    """Parses HOST:PORT or http://HOST:PORT. Raises FlagError for another form."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "http" or not host or not port or parts.path.strip("/"):
        raise FlagError(typed, "be HOST:PORT", address, "give the address that the server listens at")
    return {"host": host, "port": port}


def addresses(config: Config) -> list[Address]:
    """Returns `host` and `port` of each external engine."""
    return [split(each, ENGINES) for each in config.rollout.rollout_external_engine_addrs or []]


def router_settings(config: Config) -> dict[str, Any]:
    """Returns the fields of a RouterSpec that follow from --vllm-router-ip and --vllm-router-port."""
    ip, port = config.engine.router_ip, config.engine.router_port
    if ip is None:
        return {} if port is None else {"gateway_port": port}
    return {"host": ip, "port": port, "external": True}


def check_addresses(config: Config) -> None:
    """Checks that each external engine has a different address, and that the router's address has a port."""
    engines = addresses(config)
    for index, each in enumerate(engines):
        if each in engines[:index]:
            raise ValueError(
                f"{ENGINES} must name each engine once, got {each['host']}:{each['port']} twice; leave one out"
            )
    if config.engine.router_ip is not None and config.engine.router_port is None:
        raise FlagError(
            "--vllm-router-port",
            "be given with --vllm-router-ip",
            f"none beside {config.engine.router_ip}",
            "give the port of the router",
        )


def check_weights(config: Config) -> None:
    """Checks that a run with external engines is not colocated and sends weights through the folder --weight-dir."""
    if not config.rollout.rollout_external_engine_addrs:
        return
    if config.cluster.colocate:
        raise FlagError(ENGINES, "go without --colocate", "both", "such engines have their own GPUs")
    transport = config.weight_update.update_weight_transport
    if transport != "disk":
        raise FlagError(
            "--update-weight-transport", f"be disk with {ENGINES}", transport, "leave the flag out"
        )
    if config.weight_update.weight_dir is None:
        raise FlagError(
            "--weight-dir",
            f"be given with {ENGINES}",
            "none",
            "name a folder that trainer and engines share, the same one for `vime serve engine`",
        )


def require_joinable(config: Config, url: str, *, trained: bool) -> None:
    """Raises ValueError unless the external engine at `url` may join the present run. With `trained`, the run sends
    weights to the engine."""
    address = urlsplit(url).netloc
    if KEY_VARIABLE not in os.environ:
        raise ValueError(
            f"{KEY_VARIABLE} must be set for a run that adds an external engine, got {address} and a random key of "
            f"this run; export {KEY_VARIABLE} for the run and for the engine"
        )
    transport = config.weight_update.update_weight_transport
    if trained and (transport != "disk" or config.cluster.colocate):
        raise FlagError(
            "an external engine",
            "get its weights as files",
            f"--update-weight-transport {transport}{' and --colocate' if config.cluster.colocate else ''}",
            "start the run with --update-weight-transport disk",
        )
    if (problem := _problem(url, read_run_key(), "/health", "the engine of --address")) is not None:
        raise ValueError(problem)


def require_reachable(config: Config, path: str = "/health") -> None:
    """Sends a request to every external server, to an engine at `path`, which must be a route that needs the key.
    Raises one ValueError, within 15 s, for the servers that do not answer."""
    if not uses(config) or not config.num_engines:
        return
    key = read_run_key()
    checks: list[Callable[[], str | None]] = []
    for each in addresses(config):
        url = f"http://{each['host']}:{each['port']}"
        checks.append(lambda url=url: _problem(url, key, path, f"the engine of {ENGINES}"))  # type: ignore[misc]
    if (ip := config.engine.router_ip) is not None:
        url = f"http://{ip}:{config.engine.router_port}"
        checks.append(lambda: _router_problem(url, ip, key))
    with ThreadPoolExecutor(len(checks)) as threads:
        found = list(filter(None, threads.map(lambda check: check(), checks)))
    if found:
        raise ValueError("; ".join(found))


def _problem(url: str, key: str, path: str, what: str) -> str | None:
    try:
        request(url, key, "GET", path, timeout_s=_ANSWER_S)
    except NotProvenError as error:
        return f"{what} must be started with the key in {KEY_VARIABLE}, got: {error}"
    except ControlError as error:
        return f"{what} must take the key in {KEY_VARIABLE}, got: {error}; start both with the same key"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or error
        return (
            f"{what} must answer at {urlsplit(url).netloc}, got: {reason}; check the address and that it runs"
        )
    return None


def _router_problem(url: str, ip: str, key: str) -> str | None:
    what = f"the router of {ROUTER}"
    if (problem := _problem(url, key, "/workers", what)) is not None:
        return problem
    workers = json.loads(request(url, key, "GET", "/workers", timeout_s=_ANSWER_S)[1])["workers"]
    if workers:
        return (
            f"{what} must have no engines yet, got {len(workers)}; start one for this run, as it would send requests "
            "to engines with another key"
        )
    if not _is_loopback(ip) and answers(url, "", "/workers", timeout_s=_ANSWER_S):
        return (
            f"{what} must ask for the key, got one at {url} that anyone can add engines to; start it with "
            "`vime serve router`"
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ExternalEngine:
    """A `vime.pool.member.EngineHandle` for a server that this run neither starts nor stops.

    If the server ends, the pool waits here for a new server at the same address, up to --engine-start-timeout-s. vLLM
    takes seconds to start, and the pool polls several times per second, so the pool detects each restart.
    """

    def __init__(self, spec: EngineSpec, control: MakeControl) -> None:
        self.spec = spec
        self._control = control

    def start(self) -> str:
        return self.spec.url

    def open_gate(self) -> None: ...

    def wait_ready(self) -> None:
        """Returns once the engine serves, and resumes it, because an earlier run may have left it paused."""
        end = time.monotonic() + self.spec.start_timeout_s
        while not answers(self.spec.url, self.spec.run_key, "/health", timeout_s=5):
            if time.monotonic() >= end:
                raise RuntimeError(
                    f"the engine at {self.spec.host}:{self.spec.port} must serve within --engine-start-timeout-s "
                    f"{self.spec.start_timeout_s:g}, got no answer; it is an external server: start it again there"
                )
            time.sleep(_POLL_S)
        self._control(self.spec.url, self.spec.run_key).resume()

    def poll(self) -> int | None:
        """Returns None while a server listens at the address, else 1. A server on this host must have the run's key."""
        host, port = self.spec.host, self.spec.port
        return None if accepts(host, port) and not is_strangers(host, port, self.spec.run_key) else 1

    def whereabouts(self) -> tuple[str, bool]:
        return f"an external server at {self.spec.host}:{self.spec.port}", False

    def tail_log(self) -> str:
        return f"(the engine at {self.spec.host}:{self.spec.port} is external; its log is on that host)"

    def stop(self) -> None: ...
