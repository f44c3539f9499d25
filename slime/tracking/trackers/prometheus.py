"""Implements --use-prometheus: serves each metric's newest value at http://HOST:PORT/metrics of the driver.

A metric's name in Prometheus is `slime_` and slime's name, with `_` for each character except letters and digits.
slime's own name is the label `metric`, so that two names that become equal stay separate. The step is the metric of its
step key.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.tracking.metrics import StepKey
from slime.tracking.trackers.record import State, TrackerKind, run_name

if TYPE_CHECKING:
    from prometheus_client import Gauge

    from slime.config.schema import Config

REFUSED = re.compile("[^a-zA-Z0-9_]")
PREFIX = "slime_"
LABELS = ("metric", "run_name")


class PrometheusTracker:
    """Serves metrics at `address`, (host, port). Port 0 means a free port."""

    def __init__(self, host: str, port: int, run: str) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        # A separate registry, because the default one has all other metrics of this process.
        self._registry, self._gauge, self._run = CollectorRegistry(), Gauge, run
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise _taken(host, port, error) from error
        self.address = (host, int(self._server.server_port))
        print(f"Prometheus metrics: http://{host}:{self.address[1]}/metrics", flush=True)

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None:
        for name, value in {**metrics, step_key: float(step)}.items():
            plain = PREFIX + REFUSED.sub("_", name)
            if plain not in self._gauges:
                self._gauges[plain] = self._gauge(plain, "a metric of slime", LABELS, registry=self._registry)
            self._gauges[plain].labels(name, self._run).set(value)

    def close(self, state: State) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _taken(host: str, port: int, error: OSError) -> ValueError:
    return ValueError(
        f"--prometheus-port must be a free port of --prometheus-host {host}, got {port} ({error}); give another, or 0 "
        "for any"
    )


def _check(config: Config) -> None:
    """Raises ValueError if the port is taken, before the models are loaded."""
    host, port = config.logging.prometheus_host, config.logging.prometheus_port
    try:
        # The server, too, accepts names and both kinds of IP addresses.
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _taken(host, port, error) from error


def _make(config: Config, run_dir: Path, resume: Mapping[str, int]) -> PrometheusTracker:
    flags = config.logging
    name = run_name(flags.prometheus_run_name, config, run_dir)
    return PrometheusTracker(flags.prometheus_host, flags.prometheus_port, name)


PROMETHEUS = TrackerKind(
    "--use-prometheus",
    lambda flags: flags.use_prometheus,
    "prometheus_client",
    "prometheus_client",
    _make,
    check=_check,
)
