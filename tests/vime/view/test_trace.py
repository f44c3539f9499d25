"""Tests `vime trace`: the file has every process, a viewer can draw its lanes, and a range of steps is cut out."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from view_cases import write_run

from slime.tracking.events import Events
from slime.tracking.kinds import EVENTS_FILE
from vime.cli import main
from vime.view.spans import Lanes


def read(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    found: list[dict[str, Any]] = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)[
        "traceEvents"
    ]
    return found


def check(events: list[dict[str, Any]]) -> None:
    """Checks a viewer's requirements: all lanes' names, whole times from 0 on, and spans of a lane that nest or are
    separate."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in named and event["dur"] >= 0
            lanes[event["tid"]].append((event["ts"], -event["dur"]))
        assert isinstance(event.get("ts", 0), int)
    for spans in lanes.values():
        ends: list[int] = []
        for begin, duration in sorted(spans):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or begin - duration <= ends[-1], "spans of a lane must not cross"
            ends.append(begin - duration)


def test_a_trace_of_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert main(["trace", str(run)]) == 0
    assert "profile/run.json.gz: " in capsys.readouterr().out
    events = read(run / "profile/run.json.gz")
    check(events)
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(processes) == {"driver", "rollout", "trainer-0", "groups", "engines"}
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert spans["train 1"]["args"]["rollout"] == 1
    nested = spans["log_probs 0"]
    assert nested["pid"] == processes["trainer-0"] and nested["args"]["device"] == "cuda:0"
    assert spans["group 0"]["args"] == {
        **{"version": 0, "slowest_sample": 0, "slowest_s": 1.25, "slowest_tokens": 77},
        **{"fate": "kept", "rollout": 0},
    }
    assert spans["group 3"]["args"]["fate"] == "dropped: zero_std"
    assert {"weights of the checkpoint", "weights 0", "weights 1", "weights 2"} <= spans.keys()
    assert abs(spans["part 0 of weights 1"]["dur"] - 1000) <= 1  # both ends are rounded to microseconds
    (counter,) = [e for e in events if e["ph"] == "C"]
    assert counter["args"] == {"running": 12, "waiting": 3, "kv_cache_percent": 42.0}
    marks = [e["name"] for e in events if e["ph"] == "i"]
    assert {"step rollout 0", "dropped: zero_std", "warning", "engine-0 serving", "end"} <= set(marks)


def test_a_range_of_steps_and_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_run(tmp_path / "run", rollouts=3), tmp_path / "out.json"
    assert main(["trace", str(run), "--steps", "1:2", "--out", str(out)]) == 0
    events = read(out)
    check(events)
    spans = {e["name"] for e in events if e["ph"] == "X"}
    assert {"rollout 1", "train 1", "group 2", "group 3"} <= spans
    assert not {"rollout 0", "rollout 2", "group 0", "group 4"} & spans
    assert min(e["ts"] for e in events if e["name"] == "rollout 1") == 0
    refusals = {
        ("5:9",): "--steps must name rollouts of the run, got 5:9, and it has 0 to 2",
        ("3:1",): "--steps must be A:B with whole numbers 0 <= A < B, got 3:1",
        ("1:2", "--out", "/proc/no/file"): "--out must be a file that can be written, got /proc/no/file",
    }
    for arguments, text in refusals.items():
        assert main(["trace", str(run), "--steps", *arguments]) == 2
        assert text in capsys.readouterr().err
    assert main(["trace", str(tmp_path)]) == 2
    assert "RUN_DIR must have events.jsonl, got none" in capsys.readouterr().err


def test_a_run_that_goes_on_and_a_line_that_is_cut(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rollouts=1)
    manager = Events("rollout", str(run))
    manager.add("drawn", groups=[8], version=1)
    manager.add("phase_begin", phase="rollout", rollout=1)
    manager.close()
    with (run / EVENTS_FILE).open("a") as file:
        file.write('{"time": 1.0, "source": "rollout", "ki')
    assert main(["trace", str(run), "--out", str(run / "t.json")]) == 0
    events = read(run / "t.json")
    check(events)
    (open_phase,) = [e for e in events if e["name"] == "rollout 1"]
    assert open_phase["args"]["ended"] is False
    assert any(e["name"] == "group 8" for e in events)


def test_lanes() -> None:
    lanes = Lanes()
    placed = [lanes.assign(("a",), *span) for span in ((0, 10), (1, 5), (2, 8), (8, 9), (11, 12))]
    assert placed == [0, 0, 1, 0, 0], "(2, 8) crosses (1, 5)"
    apart = Lanes(nested=False)
    assert [apart.assign(("a",), *span) for span in ((0, 10), (1, 5), (5, 6), (10, 11))] == [0, 1, 1, 0]
