"""Tests the journal of a run: several processes write it, die or run out of room, and readers follow it during the
run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slime.tracking.events import Events, Spans
from slime.tracking.journal import Tail, follow, phases, read_events
from slime.tracking.kinds import DAMAGED, EVENTS_FILE, KINDS, VERSION
from slime.tracking.run_record import recorded
from slime.tracking.timers import Timers


def test_the_first_line_has_the_version_and_each_event_its_fields(tmp_path: Path) -> None:
    events = Events("driver", str(tmp_path))
    events.add("step", rollout=3, train_s=1.5)
    events.close()
    head, step = read_events(tmp_path)
    assert (head.kind, head["version"]) == ("journal", VERSION)
    assert (step.source, step.kind, step["rollout"], step.get("train_s"), step.get("no")) == (
        *("driver", "step", 3, 1.5),
        None,
    )
    assert time.time() - 60 < step.time <= time.time()


@pytest.mark.parametrize("fields", [{}, {"rollout": 1, "groups": [1]}])
def test_an_event_has_the_fields_of_its_kind(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="an event step must have the fields rollout"):
        Events("driver", str(tmp_path)).add("step", **fields)


def test_a_process_keeps_its_order_whatever_waits(tmp_path: Path) -> None:
    """A durable event also writes the earlier events."""
    events = Events("rollout", str(tmp_path))
    for group in range(5):
        events.add("ended", groups=[group])
        events.add("kept", groups=[group])
        events.add("drawn", groups=[group], version=0)
    found = [(event.kind, event["groups"][0]) for event in read_events(tmp_path, ("ended", "kept", "drawn"))]
    events.close()
    assert found == [(kind, group) for group in range(5) for kind in ("ended", "kept", "drawn")]


def test_an_event_that_waits_is_written_soon_and_at_the_end(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    events = Events("rollout", str(tmp_path))
    events.add("kept", groups=[1])
    assert not (tmp_path / EVENTS_FILE).exists()
    until = time.monotonic() + 30
    while not (tmp_path / EVENTS_FILE).exists() or not list(read_events(tmp_path, ("kept",))):
        assert time.monotonic() < until
        time.sleep(0.05)
    events.add("kept", groups=[2])
    events.close()
    assert [event["groups"] for event in read_events(tmp_path, ("kept",))] == [[1], [2]]
    assert not any(thread.name == "events" for thread in set(threading.enumerate()) - others)


WRITER = """
import sys
from slime.tracking.events import Events
events = Events(sys.argv[1], sys.argv[2], file_bytes=20_000)
for number in range(1000):
    events.add("drawn", groups=[number], version=0)
    events.add("kept", groups=[number])
events.close()
"""


def test_full_files_are_renamed_and_no_event_of_several_processes_is_lost(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name, str(tmp_path)]) for name in names]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    older = list(tmp_path.glob("events-*.jsonl"))
    assert len(older) > 10 and all(path.stat().st_size < 40_000 for path in older)
    events = list(read_events(tmp_path, ("drawn", "kept", DAMAGED)))
    for name in names:
        for kind in ("drawn", "kept"):
            numbers = [event["groups"][0] for event in events if (event.source, event.kind) == (name, kind)]
            assert numbers == list(range(1000))
    assert len(events) == 6000
    heads = [json.loads(path.open().readline())["kind"] for path in [*older, tmp_path / EVENTS_FILE]]
    assert set(heads) == {"journal"}


def test_a_tail_reads_each_event_once_over_renamed_files(tmp_path: Path) -> None:
    events, seen = Events("driver", str(tmp_path), file_bytes=500), []
    events.add("start", rollout=0)
    tail = Tail(tmp_path, ("step",))
    for rollout in range(30):
        events.add("step", rollout=rollout)
        if rollout % 7 == 0:
            seen += [event["rollout"] for event in tail.new()]
    seen += [event["rollout"] for event in tail.new()]
    assert seen == list(range(30)) and list(tail.new()) == [] and len(list(tmp_path.iterdir())) > 5
    tail.close()


def test_following_a_run_that_goes_on(tmp_path: Path) -> None:
    events = Events("driver", str(tmp_path))
    events.add("start", rollout=0)
    found = []
    for event in follow(tmp_path, ("start", "step"), every_s=0.01, stop=lambda: len(found) == 4):
        found.append(event.get("rollout"))
        if len(found) < 4:
            events.add("step", rollout=len(found))
    assert found == [0, 1, 2, 3]


def test_a_half_written_last_line_waits_for_its_end(tmp_path: Path) -> None:
    events = Events("driver", str(tmp_path))
    events.add("step", rollout=0)
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(b'{"time": 5.0, "source": "driver", "ki')
        file.flush()
        tail = Tail(tmp_path, ("step", DAMAGED))
        assert [event.kind for event in tail.new()] == ["step"]
        assert [event.kind for event in read_events(tmp_path, ("step", DAMAGED))] == ["step", DAMAGED]
        assert [event.kind for event in read_events(tmp_path)] == ["journal", "step"]
        file.write(b'nd": "step", "rollout": 7}\n')
        file.flush()
        assert [event["rollout"] for event in tail.new()] == [7]
    tail.close()


def test_a_journal_of_an_older_version_is_read_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    old = {"time": 5.0, "source": "driver", "kind": "start", "rollout": 2}
    (tmp_path / EVENTS_FILE).write_text(json.dumps(old) + "\n")
    assert [event["rollout"] for event in read_events(tmp_path)] == [2]
    new = {"time": 5.0, "source": "driver", "kind": "journal", "version": VERSION + 1}
    (tmp_path / EVENTS_FILE).write_text(json.dumps(new) + "\n")
    with pytest.raises(
        ValueError, match=f"must have a journal of version {VERSION} or older, got {VERSION + 1}"
    ):
        list(read_events(tmp_path))


AS_NOBODY = """
import os, sys
os.setgid(65534); os.setuid(65534)
from pathlib import Path
from slime.tracking.journal import read_events
try:
    list(read_events(Path(sys.argv[1])))
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_of_another_user_that_may_not_be_read(tmp_path: Path) -> None:
    events = Events("driver", str(tmp_path))
    events.add("start", rollout=0)
    (tmp_path / EVENTS_FILE).chmod(0o600)  # pytest's folders are readable for their user only
    # The import comes before the change of the user, who may not read the interpreter's own files.
    code = "import slime.tracking.journal\n" + AS_NOBODY
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "RUN_DIR must be a run that this user can read, got no permission for" in run.stdout


def test_phases_begin_and_end_and_a_killed_process_ends_its_own(tmp_path: Path) -> None:
    driver, rank = Events("driver", str(tmp_path)), Events("trainer-0", str(tmp_path))
    timers, spans = Timers(), Spans(rank, "cuda:0")
    timers.observer = spans
    spans.set_rollout(4)
    with driver.phase("eval", rollout=4), pytest.raises(RuntimeError), timers.measure("trainer"):
        with timers.measure("forward"):  # a micro-batch has no phase
            pass
        raise RuntimeError
    rank.add("phase_begin", phase="save", device="cuda:0", rollout=5)  # the rank is killed here
    rank.close()
    driver.add("phase_begin", phase="wait")
    driver.close()
    by_name = {phase.name: phase for phase in phases(read_events(tmp_path))}
    train, evaluation, save, wait = (by_name[name] for name in ("train", "eval", "save", "wait"))
    assert (train.source, train.device, train.rollout) == ("trainer-0", "cuda:0", 4)
    assert train.end is not None and evaluation.end is not None and len(by_name) == 4
    assert evaluation.rollout == 4 and evaluation.begin <= train.begin <= train.end <= evaluation.end
    assert save.end is None and wait.end is None
    driver.add("error", type="E", text="killed")
    driver.close()
    ends = {phase.name: phase.end for phase in phases(read_events(tmp_path))}
    assert ends["save"] == save.begin and ends["wait"] == wait.begin


def test_the_phases_of_ranks_end_when_the_trainer_is_lost(tmp_path: Path) -> None:
    driver, rank = Events("driver", str(tmp_path)), Events("trainer-0", str(tmp_path))
    rank.add("phase_begin", phase="train", rollout=5)
    rank.close()
    driver.add("phase_begin", phase="recovery", rollout=5)
    driver.add("trainer_lost", rollout=5, phase="training rollout 5", text="killed")
    driver.close()
    ended = {phase.name: phase.end is not None for phase in phases(read_events(tmp_path))}
    assert ended == {"train": True, "recovery": False}


def test_an_event_costs_little(tmp_path: Path) -> None:
    """The number exceeds the events of a step with 64 groups. They take less than 1 ms of a core's time, 0.1% of a
    one-second step. The bound is 0.5%, in CPU time, which changes little on a loaded machine."""
    events = Events("rollout", str(tmp_path))
    began = time.process_time()
    for _ in range(10):
        for number in range(77):
            events.add("phase_begin", phase="train", rollout=1, device="cuda:0")
            events.add("kept", groups=[number])
        events.add("step", rollout=1)
    seconds = (time.process_time() - began) / 10
    events.close()
    assert seconds < 0.005, f"{seconds * 1e3:.2f} ms"


def test_the_page_describes_every_kind() -> None:
    page = (Path(__file__).parents[3] / "docs" / "journal.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    described = {
        row[0].strip("|` "): (row[1], row[2].replace("`", ""), row[3], "yes" in row[4]) for row in rows
    }
    assert described == {
        kind.name: (kind.source, kind.fields, kind.about, kind.durable) for kind in KINDS.values()
    }


@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced"])
def test_a_run_whose_directory_is_gone_ends_and_makes_none(tmp_path: Path, again: bool) -> None:
    run_dir, other = tmp_path / "run", Events("rollout", str(tmp_path / "run"))
    with (
        pytest.raises(
            ValueError, match=f"--run-dir must exist while its run is active, got {run_dir}, which was"
        ),
        recorded(run_dir, rollouts=3) as driver,
    ):
        driver.add("start", rollout=0)
        other.add("drawn", groups=[1], version=0)
        shutil.rmtree(run_dir)
        if again:
            run_dir.mkdir()
        driver.add("step", rollout=0)
    for kind, fields in {
        "drawn": {"groups": [2], "version": 0},
        "dropped": {"groups": [1], "reason": "x"},
    }.items():
        with pytest.raises(ValueError, match="which was removed or replaced"):
            other.add(kind, **fields)
    other.close()
    assert list(tmp_path.iterdir()) == ([run_dir] if again else []) and not list(tmp_path.glob("run/*"))


def test_a_full_file_and_a_lost_one_are_no_lost_directory(tmp_path: Path) -> None:
    events, other = (Events(name, str(tmp_path), file_bytes=200) for name in ("driver", "engines"))
    for number in range(20):
        events.add("start", rollout=number)
        other.add("put_back", groups=[number])
        if number == 10:
            (tmp_path / EVENTS_FILE).unlink()
    events.close(), other.close()
    assert len(list(read_events(tmp_path, ("start",)))) > 15
