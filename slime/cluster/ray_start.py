"""Joins or starts the Ray cluster of a run. A cluster that the run starts is small, on this host and on loopback."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.job_config
from ray._private import services
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # Ray's stub has too few names
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]

from slime import bridges
from slime.bridges.ray import LOOPBACK, PROCESSES
from slime.cluster import ray_token
from slime.cluster.watchdog import descendants
from slime.config.child_environment import RUN_KEY
from slime.system.import_path import SAFE_PATH, UTF8, get_worker_path

logger = logging.getLogger(__name__)

LISTEN_S = 3.0
_SETTINGS = {"prestart_worker_first_driver": False, "worker_niceness": 0, "memory_monitor_refresh_ms": 0}
"""Ray's settings of a cluster that the run starts. Its memory monitor is off, because vime itself ends a run that fills
the host, with an explanation (`slime.cluster.memory_watch`)."""


def connect(*, allow_unauthenticated: bool = False, temporary: Path | None = None) -> None:
    """Joins the cluster at RAY_ADDRESS, or starts one on this host that ends with this process.

    The new cluster listens on loopback only and has a new token. A cluster that the run joins must require a token too,
    unless `allow_unauthenticated`.

    The new cluster has a small object store, because the store only holds rollout data; Ray's default is 30% of memory.
    The cluster starts no idle workers, and no dashboard, autoscaler and log monitor. Its actors have the niceness of
    this process. Ray's default is 15. With it, one other busy process takes a whole core, and the threads of the
    trainer and the engine wait for the thread without a core. The output of actors goes to the run directory
    (actors.log_to). The sockets and logs of Ray go to `temporary`. Each process of Ray has a separate process group: a
    signal for the driver's group (timeout, a closed terminal) must not end Ray before the run that needs it.
    """
    # Otherwise Ray logs at each start that it requires a token.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    job = ray.job_config.JobConfig(_py_driver_sys_path=_Fixed(reversed(get_worker_path(os.environ))))
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "job_config": job}
    joined = os.environ.get("RAY_ADDRESS")
    if joined:
        require_listening(joined)
    if not joined:
        ray_token.use_own_token(os.environ)
    elif not allow_unauthenticated:
        ray_token.use_user_token(os.environ)
    _read_authentication_again()
    # Ray's servers listen on loopback if the node's address is loopback. ray.init replaces such an address with
    # another address of the host, unless clusters of several hosts are disabled (the default on macOS and Windows).
    on_loopback = not joined or joined.startswith("127.0.0.1:")
    with bridges.applied(*[LOOPBACK] * on_loopback):
        if joined:
            if not allow_unauthenticated:
                # Check before ray.init, because ray.init sends the token to the server at this address.
                address = services.canonicalize_bootstrap_address_or_die(joined)
                ray_token.require_own_server(address)
                ray_token.require_authentication(address)
            ray.init(**quiet)
        else:
            # Each process gets a process group. Processes that a run does not need are not started.
            with bridges.applied(*PROCESSES), _safe_path():
                _start(
                    address="local",
                    _temp_dir=None if temporary is None else str(temporary),
                    include_dashboard=False,
                    object_store_memory=512 * 2**20,
                    _system_config=_SETTINGS,
                    **quiet,
                )


class _Fixed(list[str]):
    """Entries at the front of the workers' import path, in reverse order.

    Ray would extend this list with the current folder and the folder of the script, and replace an empty list.
    """

    def extend(self, more: Iterable[str]) -> None:
        """Adds nothing."""

    def __bool__(self) -> bool:
        return True


def require_listening(address: str) -> None:
    """Raises ValueError if nothing accepts a connection at HOST:PORT within LISTEN_S seconds.

    Ray itself would try for 50 s, and its error would not name the variable. Ray resolves other forms of an address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    end = time.monotonic() + LISTEN_S
    while True:
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=max(0.1, end - time.monotonic())
            ).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise ValueError(
                    f"RAY_ADDRESS must be the address of a running Ray cluster, got {address}, where nothing answered "
                    f"within {LISTEN_S:g} s ({error}); start it (docs/several-hosts.md), or unset RAY_ADDRESS to use "
                    "this machine alone"
                ) from error
        time.sleep(0.2)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Sets the environment for the start of Ray's processes and their children. The environment is restored after the
    block, because this process's own children may be the user's scripts.

    Ray's processes get no run key. Trainers and rewards do not need the key, and a process that sends requests gets the
    key in a message.
    """
    before = {name: os.environ.get(name) for name in (*SAFE_PATH, *UTF8, RUN_KEY)}
    os.environ.update(SAFE_PATH | UTF8)
    os.environ.pop(RUN_KEY, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start(**settings: Any) -> None:
    """Calls ray.init, and calls it again if Ray's first processes do not answer within the 30 s that Ray waits for
    them."""
    before = descendants(os.getpid())
    try:
        ray.init(**settings)
    except Exception as error:  # Ray raises a plain Exception
        if "timed out during startup" not in str(error):
            raise
        logger.warning("Ray did not start within 30 s; the machine may be busy; trying once more")
        for process in descendants(os.getpid()) - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ray.init(**settings)


def _read_authentication_again() -> None:
    """Makes Ray read its authentication variables again, because it read them at its import, before they were set."""
    RayConfig.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
