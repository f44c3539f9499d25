"""Tests the parts of a soak: its flags, plan, processes, growth, proof and page, and the proxy that loses replies."""

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

from slime.records.errors import FlagError
from slime.tracking.events import Events
from slime.tracking.run_record import recorded
from vime.soak import command
from vime.soak.faults import FAULTS, KILLS, OTHERS, Target
from vime.soak.growth import Reading, find_growth, read_parts
from vime.soak.page import format_page
from vime.soak.parts import PARTS, Descendants, find_absent
from vime.soak.plan import Planned, choose_faults
from vime.soak.progress import Progress, ProgressReader
from vime.soak.proxy import Proxy
from vime.soak.record import SoakSettings, make_record, write_record
from vime.soak.replies import ROUTER_FILE
from vime.soak.runner import Strike


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
    found = find_growth([*life(1, percent), *life(2, percent, level=440_000)], "trainer", 32)
    assert found.processes == 2 and found.blocks == 22
    assert found.memory is not None and found.memory.value == pytest.approx(percent, abs=0.3)
    assert found.threads is not None and found.threads.value == 0
    assert found.is_too_fast is too_fast


def test_growing_files_are_too_many() -> None:
    leak = [Reading(step, "router", 1, 60_000, 40 + step // 10, 5) for step in range(200)]
    found = find_growth(leak, "router", 100)
    assert found.files is not None and found.files.value == pytest.approx(10, rel=0.05) and found.is_too_fast


def test_a_router_warms_up_by_requests() -> None:
    """The heaps of a router's threads grow in its first 4,000 requests, and not later."""
    readings = [Reading(step, "router", 1, 64_000 + 30 * min(step, 125), 40, 5) for step in range(260)]
    found = find_growth(readings, "router", 32)
    assert found.memory is not None and found.memory.value == 0 and not found.is_too_fast
    assert find_growth(readings, "router", 1).memory is None, "too few requests to judge"


def test_too_few_steps_are_not_judged() -> None:
    found = find_growth(life(1, 50.0, steps=100), "trainer", 32)
    assert found.blocks == 5 and found.memory is None and not found.is_too_fast


PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"


def test_a_process_is_read_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "parent", r"^\S+ -c import subprocess")
    code = PARENT.format(child="b = bytearray(30 << 20); print(flush=True); input()")
    started = Descendants()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        (found,) = read_parts(started, 3, ["parent"])
        process.communicate(b"\n")
    started.end()
    assert (found.step, found.process) == (3, process.pid)
    assert found.memory_kib > 30 << 10 and found.threads == 2 and found.files >= 6


def test_a_soak_ends_only_the_processes_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the same command line, which was started earlier, is neither found nor killed. A child whose
    parent was killed is found."""
    monkeypatch.setitem(PARTS, "sleeper", r"^\S+ -c import time, sys")
    code = "import time, sys; print(flush=True); time.sleep(600)"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        started = Descendants()
        parent = subprocess.Popen([sys.executable, "-c", PARENT.format(child=code)], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        parent.stdout.readline()
        (found,) = started.find("sleeper")
        assert found.pid != other.pid
        parent.kill()
        parent.communicate(timeout=0.0) if parent.stdout.closed else parent.wait()
        parent.stdout.close()
        assert [one.pid for one in started.find("sleeper")] == [found.pid], "an orphan belongs to the soak"
        started.end()
        assert not found.is_running() and other.poll() is None
        other.kill()


def written_run(run_dir: Path, steps: int = 2, over_limit: int = 0) -> None:
    with recorded(run_dir, steps) as driver:
        rollout = Events("rollout", str(run_dir))
        driver.add("start", rollout=0)
        for step in range(steps):
            rollout.add("drawn", groups=[step], version=0)
            rollout.add("batch", rollout=step, groups=[step], over_limit=over_limit)
            driver.add("step", rollout=step)
        rollout.close()
    rows = [{"step_key": "rollout/step", "step": step, "perf/step_time": 0.5} for step in range(steps)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (run_dir / "environment.json").write_text('{"git": {"commit": "0123456789"}}', encoding="utf-8")


def make_settings(steps: int = 2) -> SoakSettings:
    return SoakSettings(["--steps", "2"], 0, steps, 1, 0, ["engine"], 0, 1, 32, 15.0, 60.0, "quiet")


def test_the_page_and_the_record_have_recoveries_and_proof(tmp_path: Path) -> None:
    written_run(tmp_path)
    strikes = [Strike("engine", 0, 1.0, recovery_s=4.0), Strike("engine", 1, 9.0, recovery_s=8.0)]
    record = make_record(tmp_path, make_settings(), strikes, [], 1, [], None)
    assert record["failures"] == [] and record["speed"]["steps"] == 2
    page = format_page(record)
    for line in (
        "**Passed.**",
        "| engine | 2 | 0 | 6.0 s | 8.0 s |",
        "| lost groups | ok | none |",
        "commit 0123456",
    ):
        assert line in page
    write_record(record, tmp_path / "soak.json")
    written = json.loads((tmp_path / "soak.json").read_text())
    assert written["settings"]["median_s"] == 15.0
    assert written["measured"] == {"faults": 2, "median_s": 6.0, "worst_s": 8.0}


def test_the_record_lists_what_failed(tmp_path: Path) -> None:
    written_run(tmp_path)
    bad = [Strike("driver", 1, 2.0, recovery_s=70.0, restarted=3.0), Strike("lost-replies", 1, 2.0)]
    leak = list(life(1, 4.0))
    record = make_record(tmp_path, make_settings(), bad, leak, 2, [Planned(2, "gcs")], "it hung")
    failures = "\n".join(record["failures"])
    for words in (
        *(
            "the run broke: it hung",
            "gcs, planned for step 2, was not caused",
            "no recovery from lost-replies",
        ),
        *("affected no reply", "median recovery took 70.0 s", "longest recovery took 70.0 s"),
        "trainer grows: memory +",
    ):
        assert words in failures
    assert "**Failed.**" in format_page(record)
    write_record(record, tmp_path / "soak.json")
    written = json.loads((tmp_path / "soak.json").read_text())
    assert len(written["readings"]) == len(leak) and written["failures"] == record["failures"]


@pytest.mark.parametrize(
    ("steps", "over_limit", "twice", "expected"),
    [
        (3, 0, False, "steps: 1 of 3 not trained: 2"),
        (2, 5, False, "samples beyond --max-staleness: 5"),
        (2, 0, True, "groups in two batches: 1"),
    ],
)
def test_the_proof_fails(tmp_path: Path, steps: int, over_limit: int, twice: bool, expected: str) -> None:
    """A step that was not trained, samples that were too old, or a group that was trained twice fail the soak."""
    written_run(tmp_path, over_limit=over_limit)
    if twice:
        events = Events("rollout", str(tmp_path))
        events.add("batch", rollout=0, groups=[0, 1], over_limit=0)
        events.close()
    strike = Strike("engine", 0, 1.0, recovery_s=4.0)
    record = make_record(tmp_path, make_settings(steps), [strike], [], 1, [], None)
    failures = "; ".join(record["failures"])
    assert expected.replace("5", str(2 * over_limit)) in failures


def test_a_soak_without_a_fault_proves_nothing(tmp_path: Path) -> None:
    written_run(tmp_path)
    assert "no fault was caused" in make_record(tmp_path, make_settings(), [], [], 1, [], None)["failures"][0]


def test_a_recovery_waits_for_groups_that_ran_at_the_fault() -> None:
    """The batch that was made before the fault does not count as recovered. With --max-staleness 1, the next does
    not either."""
    seen = Progress(
        steps=[(0, 5.0), (1, 11.0), (2, 14.0), (3, 20.0)], batches=[(1, 9.0), (2, 12.0), (3, 19.0)]
    )
    assert seen.recovered(10.0, 0) == 14.0 and seen.recovered(10.0, 1) == 20.0
    assert seen.recovered(10.0, 2) is None


def test_the_progress_follows_the_journal(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path)
    assert reader.read().trained == 0
    driver = Events("driver", str(tmp_path))
    driver.add("step", rollout=6)
    assert reader.read().trained == 7
    driver.add("step", rollout=3)  # a resumed run trains a rollout again
    assert reader.read().trained == 4 and len(reader.read().steps) == 2
    driver.close()
    reader.close()


def test_the_plan_is_seeded_and_has_each_kind_equally_often() -> None:
    plan = choose_faults(list(FAULTS), steps=300, every=12, staleness=1, seed=0)
    assert plan == choose_faults(list(FAULTS), steps=300, every=12, staleness=1, seed=0)
    assert plan != choose_faults(list(FAULTS), steps=300, every=12, staleness=1, seed=1)
    assert len(plan) == 25 and {one.kind for one in plan} == set(FAULTS)
    assert [one.step // 12 for one in plan][:-1] == list(range(24))
    counts = [sum(one.kind == kind for one in plan) for kind in FAULTS]
    assert max(counts) - min(counts) <= 1
    assert plan[0].step >= 1 and plan[-1].step <= 296, "the last recovery needs steps"


class TestFlags:
    """Errors of flags, before anything is started."""

    @pytest.fixture
    def flags(self, tmp_path: Path) -> list[str]:
        model = tmp_path / "model"
        model.mkdir()
        shape = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 128,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
        }
        (model / "config.json").write_text(json.dumps(shape))
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
        return [
            *("--device", "cpu", "--rollout-num-gpus", "1", "--actor-num-gpus-per-node", "1"),
            *(
                "--hf-checkpoint",
                str(model),
                "--prompt-data",
                str(tmp_path / "prompts.jsonl"),
                "--rm-type",
                "math",
            ),
            *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "1"),
            *("--rollout-max-response-len", "8", "--run-dir", str(tmp_path / "run")),
        ]

    @pytest.mark.parametrize(
        ("more", "expected"),
        [
            ("--every 0", "--every must be at least 1, got 0"),
            ("--kill engin", "--kill must name some of engine, .* got engin"),
            ("--faults engine", "--faults must name some of stopped-engine, .* got engine"),
            ("--steps 5 --every 10", "--steps must be at least --every plus --quiet-steps, got 5, 10 and 0"),
            ("--steps 4 --every 1 --kill engine", "--steps must be above 4, got 4"),
            ("--quiet-steps -1", "--quiet-steps must not be below 0"),
            ("--kill engine,manager", "--save must be given for the faults manager, got none"),
            (
                "--kill trainer --max-trainer-restarts 0",
                "--save must be given for the faults trainer, got none",
            ),
            ("--kill gcs --save {0}/save", "--save-interval must be at most .* got none"),
            ("--kill gcs --save {0}/save --save-interval 57", "--save-interval must be at most 56 .* got 57"),
            ("--kill engine --save {0}/old", "--save must be a folder without checkpoints for a soak"),
            ("--kill engine --run-dir {0}/other", "--run-dir must be a new folder for a soak"),
            ("--kill=", "--kill must name a part"),
            (
                "--kill engine --rollout-external-engine-addrs 10.0.0.1:80 --weight-dir {0}/w",
                "--kill must name parts that the run starts, got engine, but the engines of",
            ),
            (
                "--kill router --vllm-router-ip 10.0.0.1 --vllm-router-port 80",
                "got router, but the router at 10.0.0.1 is not the run's own",
            ),
            (
                "--faults full-disk --save {0}/save --save-interval 4",
                "--run-dir must be the mount point of a disk",
            ),
        ],
    )
    def test_errors(self, flags: list[str], tmp_path: Path, more: str, expected: str) -> None:
        (tmp_path / "old/iter_0000003").mkdir(parents=True)
        (tmp_path / "old/iter_0000003/metadata.json").touch()
        (tmp_path / "other").mkdir()
        (tmp_path / "other/events.jsonl").touch()
        with pytest.raises(FlagError, match=expected):
            command.main([*flags, *(word.format(tmp_path) for word in more.split())])

    @pytest.mark.parametrize("part", ["raylet", "gcs", "trainer", "manager", "engine"])
    def test_parts_of_a_joined_cluster_are_not_the_soaks(self, part: str, flags: list[str]) -> None:
        _, words = command._read([*flags], 60)
        config, _ = command._read(words, 60)
        assert find_absent(config, part, {}) is None
        assert "RAY_ADDRESS=10.0.0.1:6379" in str(find_absent(config, part, {"RAY_ADDRESS": "10.0.0.1:6379"}))


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
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(mounted.stderr)
    target = Target(disk, None, None, None, random.Random(0))  # type: ignore[arg-type]
    try:
        command._check_disk(disk)
        fault = FAULTS["full-disk"]
        assert fault.begin(target)
        with pytest.raises(OSError, match="No space left"):
            (disk / "more").write_bytes(b"x")
        fault.end(target)
        (disk / "more").write_bytes(b"x")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_each_fault_is_killed_or_listed() -> None:
    assert KILLS.keys() == PARTS.keys() and not KILLS.keys() & OTHERS.keys()
