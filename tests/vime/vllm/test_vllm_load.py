"""Tests the load of an engine, read from its page of metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vime.pool.control import ControlError, EngineLoad
from vime.vllm.control import GAUGES, VllmControl

PAGE = "".join(f'{name}{{engine="{i}"}} {i + 1}.0\n' for name in GAUGES[:2] for i in (0, 1))
CACHES = f'{GAUGES[2]}{{engine="0"}} 0.25\n{GAUGES[2]}{{engine="1"}} 0.75\n'


@pytest.fixture
def control(request: pytest.FixtureRequest) -> Iterator[VllmControl]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(request.param.encode())

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield VllmControl(f"http://127.0.0.1:{server.server_port}", "k")
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("control", [PAGE + CACHES], indirect=True)
def test_its_processes_are_added_up(control: VllmControl) -> None:
    assert control.load() == EngineLoad(running=3, waiting=3, kv_cache=0.5)


@pytest.mark.parametrize("control", ["python_gc_objects_collected_total 7.0\n"], indirect=True)
def test_a_server_without_gauges_does_not_say(control: VllmControl) -> None:
    """--vllm-disable-log-stats has this effect."""
    assert control.load() is None


@pytest.mark.parametrize("control", [PAGE], indirect=True)
def test_a_gauge_of_another_name_is_an_error(control: VllmControl) -> None:
    with pytest.raises(ControlError, match=rf"must have the metrics {GAUGES[2]}, got a page without them"):
        control.load()
