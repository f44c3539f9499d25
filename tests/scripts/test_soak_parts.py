"""Tests the parts of a soak: growth of memory, files and threads; its report; and the proxy that loses replies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import soak
import soak_parts
from soak_generate import ROUTER_FILE
from soak_parts import Reading, growth
from soak_proxy import Proxy
from soak_report import Strike, Task, make_record, markdown, write

from slime.tracking.events import Events


def life(process: int, percent: float, *, steps: int = 160, level: int = 400_000) -> Iterator[Reading]:
    """Returns the readings of a process whose memory grows by `percent` per 100 steps after a steep start. Each
    step allocates and frees memory."""
    chance = random.Random(process)
    for step in range(steps):
        start = 0.8 + 0.2 * min(step, 40) / 40
        memory = level * (start + percent / 100 * step / 100) + chance.choice((0, 0, 60_000))
        yield Reading(step, "trainer", process, int(memory), 50 + int(percent * step / 100), 20)


@pytest.mark.parametrize(("percent", "too_fast"), [(0.0, False), (0.8, False), (3.0, True)])
def test_a_slope_is_found_under_noise_and_over_restarts(percent: float, too_fast: bool) -> None:
    found = growth([*life(1, percent), *life(2, percent, level=440_000)], "trainer")
    assert found.processes == 2 and found.blocks == 22
    assert found.memory is not None and found.memory.value == pytest.approx(percent, abs=0.3)
    assert found.threads is not None and found.threads.value == 0
    assert found.is_too_fast is too_fast


def test_growing_files_are_too_many() -> None:
    leak = [Reading(step, "router", 1, 60_000, 40 + step // 10, 5) for step in range(200)]
    found = growth(leak, "router")
    assert found.files is not None and found.files.value == pytest.approx(10, rel=0.05) and found.is_too_fast


def test_too_few_steps_are_not_judged() -> None:
    found = growth(life(1, 50.0, steps=100), "trainer")
    assert found.blocks == 5 and found.memory is None and not found.is_too_fast


def test_a_process_is_read_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(soak_parts.PARTS, "parent", r"^\S+ -c import subprocess")
    child = "b = bytearray(30 << 20); print(flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        (found,) = soak_parts.readings(3, ["parent"])
        process.communicate(b"\n")
    assert (found.step, found.process) == (3, process.pid)
    assert found.memory_kib > 30 << 10 and found.threads == 2 and found.files >= 6


def written_run(run_dir: Path) -> None:
    rollout, driver = Events("rollout", str(run_dir)), Events("driver", str(run_dir))
    driver.add("start", rollout=0)
    for step in range(2):
        rollout.add("drawn", groups=[step], version=0)
        rollout.add("batch", rollout=step, groups=[step], over_limit=0)
        driver.add("step", rollout=step)
    rows = [
        {"step_key": "rollout/step", "step": step, "perf/step_time": 0.5, "rollout/response_len/mean": 10.0}
        for step in range(2)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_record_says_what_failed(tmp_path: Path) -> None:
    written_run(tmp_path)
    task = Task(["--steps", "2"], 2, 1, 15.0, 60.0, "quiet")
    good = Strike("engine", 0, 1.0, recovery_s=4.0)
    record = make_record(tmp_path, task, [good], [], 1, [], {}, None)
    assert record["failures"] == [] and record["ledger"]["trained"] == 2
    assert "| engine | 1 | 0 | 4.0 s | 4.0 s |" in markdown(record) and "**Passed.**" in markdown(record)

    bad = [Strike("driver", 1, 2.0, recovery_s=70.0, restarted=3.0), Strike("lost replies", 1, 2.0)]
    leak = list(life(1, 4.0))
    record = make_record(tmp_path, task, bad, leak, 2, [(2, "gcs")], {"full disk": "no root"}, "it hung")
    said = "\n".join(record["failures"])
    for words in (
        *("the run broke: it hung", "never caused: gcs", "no recovery from lost replies", "hit no reply"),
        *("median recovery took 70.0 s", "longest recovery took 70.0 s", "trainer grows: memory +"),
    ):
        assert words in said
    write(record, tmp_path / "soak")
    assert "LEFT OUT: full disk: no root" in (tmp_path / "soak.md").read_text()
    kept = json.loads((tmp_path / "soak.json").read_text())
    assert len(kept["readings"]) == len(leak) and kept["failures"] == record["failures"]


def test_a_recovery_waits_for_what_ran_at_the_fault() -> None:
    """The batch that was cut before the fault does not count as recovered. With --max-staleness 1, the next does
    not either."""
    seen = soak.Progress(
        steps=[(0, 5.0), (1, 11.0), (2, 14.0), (3, 20.0)], batches=[(1, 9.0), (2, 12.0), (3, 19.0)]
    )
    assert seen.recovered(10.0, 0) == 14.0 and seen.recovered(10.0, 1) == 20.0
    assert seen.recovered(10.0, 2) is None


def test_the_plan_has_every_fault_before_the_quiet_steps(tmp_path: Path) -> None:
    arguments, kinds = soak.parsed(["--steps", "500", "--work", str(tmp_path)])
    plan = soak.make_plan(arguments, kinds)
    assert len(plan) == 24 and {kind for _, kind in plan} == set(soak.FAULTS)
    assert plan == sorted(plan, key=lambda one: one[0]) and plan[0][0] >= 4 and plan[-1][0] < 300


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    """Starts the proxy in front of a server that answers each line with the same line."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
        writer.close()

    made = Proxy(tmp_path)
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(answer, "127.0.0.1", 0), made._loop)
    port = server.result().sockets[0].getsockname()[1]
    (tmp_path / ROUTER_FILE).write_text(f"http://127.0.0.1:{port}", encoding="utf-8")
    yield made
    made.close()


def asked(proxy: Proxy, tmp_path: Path, timeout_s: float = 5.0) -> bytes:
    """Returns the bytes that a new connection gets before it ends, or the whole line."""
    port = int((tmp_path / "proxy.url").read_text().rpartition(":")[2])
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client:
        client.sendall(b"12345678\n")
        while not got.endswith(b"\n") and (piece := client.recv(100)):
            got += piece
    return got


def test_the_proxy_passes_delays_cuts_and_loses_replies(proxy: Proxy, tmp_path: Path) -> None:
    assert asked(proxy, tmp_path) == b"12345678\n" and proxy.hit == 0
    proxy.hold_until = time.time() + 0.5
    began = time.monotonic()
    assert asked(proxy, tmp_path) == b"12345678\n" and time.monotonic() - began > 0.4
    proxy.to_cut = 1
    assert asked(proxy, tmp_path) == b"1234"
    proxy.to_lose = 1
    with pytest.raises(TimeoutError):
        asked(proxy, tmp_path, timeout_s=0.3)
    assert asked(proxy, tmp_path) == b"12345678\n" and proxy.hit == 3
    (tmp_path / ROUTER_FILE).write_text("http://127.0.0.1:1", encoding="utf-8")
    assert asked(proxy, tmp_path) == b"", "a router that is gone"


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small tmpfs needs root")
def test_the_disk_is_full_until_the_fault_ends(tmp_path: Path) -> None:
    disk = tmp_path / "run"
    if refused := soak.mount_small_disk(disk):
        pytest.skip(refused)
    place = soak.Place(disk, None, None)  # type: ignore[arg-type]
    try:
        fault = soak.FAULTS["full disk"]
        assert fault.begin(place)
        with pytest.raises(OSError, match="No space left"):
            (disk / "more").write_bytes(b"x")
        fault.end(place)
        (disk / "more").write_bytes(b"x")
    finally:
        soak.keep(disk, tmp_path / "kept")
    assert (tmp_path / "kept/more").exists() and not list(disk.iterdir())
