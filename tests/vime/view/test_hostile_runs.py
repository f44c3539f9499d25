"""Tests run directories that other users have changed: links, pipes, huge files, and valid JSON lines with wrong
content."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from run_readers import READERS, SLOW, ends_within, read_with
from view_cases import write_run

from slime.tracking.environment import write_environment
from slime.tracking.journal import read_events
from slime.tracking.kinds import CHECKS, DAMAGED, KINDS
from slime.tracking.run_engines import UNKNOWN, RunEngines
from slime.tracking.run_files import MOST_BYTES, MOST_OF_LINE, open_file, parse, read_lines
from slime.tracking.samples import read_samples
from slime.tracking.trackers import JsonlTracker, MetricLines
from vime.view.compare import comparison
from vime.view.page.command import open_runs

ALL = [*READERS, *SLOW]
OF_METRICS = {"summary", "doctor", "compare", "ui", "watch", "bench", "plot"}
OF_JOURNAL = set(ALL) - {"bench", "plot"}
FILES = {"metrics.jsonl": OF_METRICS, "events.jsonl": OF_JOURNAL, "events-1.jsonl": OF_JOURNAL}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_out(path: Path) -> None:
    other = path.parent.parent / "private"
    other.write_text('{"secret": 1}\n')
    path.symlink_to(other)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # it takes no room on the disk


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("plant", [pipe, link_out, link_to_device, folder, huge, loop])
def test_a_file_that_is_none_of_the_run_is_named_and_never_waited_for(tmp_path: Path, plant) -> None:
    for name, readers in FILES.items():
        run = write_run(tmp_path / plant.__name__ / name)
        (run / name).unlink(missing_ok=True)
        plant(run / name)
        for reader in ALL if name == "metrics.jsonl" else READERS:  # plot reads nothing else
            text, error = read_with(reader, run)
            assert "secret" not in text
            if reader in readers:
                assert error is not None and str(run / name) in error, (reader, name, text[:200])
            else:
                assert error is None, (reader, name, error)


@pytest.mark.parametrize("plant", [pipe, link_out, link_to_device, huge])
@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_other_files_are_opened_in_the_same_way(tmp_path: Path, plant, name: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    plant(run / name)
    for reader in ("compare", "ui"):
        _, error = read_with(reader, run)
        assert error is not None and str(run / name) in error, reader


def test_what_is_planted_after_the_start_of_the_page_is_refused(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run,) = open_runs([run_dir])
    (run_dir / "metrics.jsonl").unlink()
    link_out(run_dir / "metrics.jsonl")
    pipe(run_dir / "events-1.jsonl")
    (run_dir / "environment.json").symlink_to("/etc/passwd")
    (run_dir / "samples").mkdir()
    (run_dir / "samples" / "0.jsonl").symlink_to("/etc/passwd")
    for read in (run.curves, run.summary, run.timeline, run.settings, lambda: run.samples(0)):
        with ends_within(10), pytest.raises(ValueError, match="the files of a run must be"):
            read()


def test_links_inside_the_run_and_to_the_run_are_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").rename(run / "metrics.old")
    (run / "metrics.jsonl").symlink_to("metrics.old")
    (tmp_path / "linked").symlink_to(run)
    for reader in READERS:
        assert read_with(reader, tmp_path / "linked")[1] is None, reader


def test_a_run_that_resumes_opens_no_pipe(tmp_path: Path) -> None:
    pipe(tmp_path / "metrics.jsonl")
    with ends_within(10), pytest.raises(ValueError, match="must be regular files"):
        JsonlTracker(tmp_path / "metrics.jsonl", {})


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    with (tmp_path / "long").open("wb") as file:
        file.write(b"one\n")
        file.truncate(3 * MOST_OF_LINE)
        file.seek(0, os.SEEK_END)
        file.write(b"\ntwo\n")
    opened = open_file(tmp_path, "long")
    assert opened is not None
    with opened:
        assert [(line[:3], len(line)) for line in read_lines(opened)] == [
            (b"one", 4),
            (bytes(3), MOST_OF_LINE + 1),
            (b"two", 4),
        ]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"a":' * 900 + "1" + "}" * 900, "[1]", "1", "\x00"]
)
def test_what_is_no_flat_object_is_no_line(text: str) -> None:
    assert parse(text.encode()) is None


WRONG = (None, True, -1.5, "text", [], [None], {}, {"a": {}}, float("nan"), 10**400, 2**60, ["\ud800", 1])


def wrong_lines() -> list[str]:
    """Returns each kind without each of its fields, and with each wrong value in each of its fields."""
    texts = {name: "x" for name, check in CHECKS.items() if check("x")}
    right: dict[str, object] = {**texts, "state": "finished", "groups": [1]}
    right |= {"engines": ["x"], "scores": {"x": 1.0}}
    found = []
    of_kinds = {
        "memory": {"host": {}, "cards": [], "processes": {}},
        "started": {"parts": {"checks": 1.5}},
        "drawn": {"groups": [1], "version": 1, "prompts": [[0, 1, 1, 5], None]},
    }
    for kind in KINDS.values():
        fields = {name: right.get(name, 1) for name in kind.allowed} | of_kinds.get(kind.name, {})
        assert kind.read(fields) == fields
        head = {"time": 1.0, "source": "driver", "kind": kind.name}
        lines = [{name: value for name, value in fields.items() if name != left} for left in kind.required]
        lines += [fields | {name: value} for name in fields for value in WRONG]
        found += [json.dumps(head | line) for line in lines if kind.read(line) is None]
        found += [json.dumps({**head, name: value, **fields}) for name in head for value in ([], {}, None)]
    head = {"source": "driver", "kind": "end", "state": "finished"}
    times = (None, "1", True, -1.0, 1e12, float("nan"), [])
    found += [json.dumps({"time": time, **head}) for time in times]
    return [*found, "[]", "1", '"x"', "null", "{}", "", '{"kind": {}}', "\\", "[" * 5000]


def test_lines_that_are_json_and_wrong_are_counted_and_change_nothing(tmp_path: Path) -> None:
    """The table of kinds lists the fields, so no reader gets a wrong field."""
    run = write_run(tmp_path / "run")
    clean = {
        reader: read_with(reader, run)[0]
        for reader in ("engines", "bench", "trace", "compare", "ui", "watch")
    }
    wrong = wrong_lines()
    assert len(wrong) > 1000
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in wrong)
    assert len(list(read_events(run, (DAMAGED,)))) == len(wrong)
    for reader, before in clean.items():
        text, error = read_with(reader, run)
        assert error is None, (reader, error)
        if reader in ("engines", "bench", "trace"):
            assert text == before
    assert f"{len(wrong)} lines that cannot be read" in read_with("doctor", run)[0]
    assert f"{len(wrong)} damaged lines in events.jsonl" in read_with("watch", run)[0]
    assert f"{len(wrong)} damaged lines in events.jsonl are left out" in read_with("compare", run)[0]
    (page,) = open_runs([run])
    assert page.summary()["damaged"] == {"events.jsonl": len(wrong)}


METRICS = (
    "[]", "1", "null", "x", "{}", '{"step_key": [], "step": 0}', '{"step_key": "train/step"}',
    '{"step_key": "train/step", "step": -1}', '{"step_key": "train/step", "step": true}',
    '{"step_key": "train/step", "step": 1.0}', '{"step_key": "train/step", "step": "1"}',
    '{"step_key": "train/step", "step": 99999999999999999999}', '{"step_key": "other", "step": 1}',
    '{"step_key": "train/step", "step": 1, "train/loss": "1"}',
    '{"step_key": "train/step", "step": 1, "train/loss": [1]}',
    '{"step_key": "train/step", "step": 1, "train/loss": true}',
    '{"step_key": "train/step", "step": 1, "train/loss": ' + "9" * 400 + "}",
    '{"step_key": "train/step", "step": 1, "nonfinite": []}',
    '{"step_key": "train/step", "step": 1, "nonfinite": {"a": 1}}',
    '{"step_key": "train/step", "step": 1, "time": "now"}', "\udcff", '{"a":' * 5000,
)  # fmt: skip


def test_metrics_that_are_json_and_wrong_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "metrics.jsonl"
    right = path.read_bytes()
    wrong = [line.encode(errors="surrogateescape") + b"\n" for line in METRICS]
    path.write_bytes(b"".join(wrong) + right + b'{"step_key": "train/st')
    lines = MetricLines(path)
    assert len(list(lines)) == right.count(b"\n") and lines.damaged == len(METRICS) and lines.torn
    for reader in READERS:
        assert read_with(reader, run)[1] is None, reader
    assert f" {len(METRICS)} lines that cannot be read" in read_with("doctor", run)[0]
    assert f"{len(METRICS)} damaged lines are left out" in read_with("plot", run)[0]
    assert open_runs([run])[0].summary()["damaged"] == {"metrics.jsonl": len(METRICS)}
    JsonlTracker(path, {}).close()  # as a run that resumes
    assert path.read_bytes() == right
    assert (run / "metrics.dropped.jsonl").read_bytes() == b"".join(wrong)


def test_huge_steps_and_values_cost_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        for value in (1e299, -1e299, 0.0, float("inf")):
            row = {"step_key": "rollout/step", "step": 2**52, "time": 1.0, "rollout/raw_reward": value}
            file.write(json.dumps(row | {"perf/step_time": 1.0, "train/grad_norm": value}) + "\n")
    for reader in READERS:
        with ends_within(20):
            assert read_with(reader, run)[1] is None, reader


def test_samples_that_are_json_and_wrong_are_counted(tmp_path: Path) -> None:
    right = {
        **{"place": 1, "index": 2, "group": 3, "prompt": "p", "response": "r", "label": "l", "reward": 1.0},
        **{"status": "completed", "versions": [1], "turns": 1, "metadata": {}, "advantage": None},
        "tokens": [["r", 5, 1, -0.5, None]],
    }
    wrong: list[object] = [{name: v for name, v in right.items() if name != left} for left in right]
    wrong = [line for line in wrong if not {"advantage", "metadata", "index", "group"} - line.keys()]  # type: ignore[attr-defined]
    for name in ("place", "prompt", "response", "status", "versions", "turns", "metadata", "tokens", "index"):
        wrong += [
            right | {name: value}
            for value in (True, 1.5, [1.5], [["r"]], {"a": []}, "x" if name != "x" else 1)
        ]
    names_of_texts = ("prompt", "response", "status")
    wrong = [line for line in wrong if not any(line.get(n) == "x" for n in names_of_texts)]  # type: ignore[union-attr, attr-defined]
    wrong = [line for line in wrong if line.get("metadata") != {"a": []}]  # type: ignore[union-attr, attr-defined]
    wrong += [[], 1, None, right | {"label": json.loads("[" * 80 + "]" * 80)}]
    run = write_run(tmp_path / "run")
    (run / "samples").mkdir()
    lines = [
        {"version": 1, "rollout": 0, "of": 1},
        right,
        *wrong,
        right | {"place": 2, "prompt": [{"role": 1}]},
    ]
    (run / "samples" / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = [
        {"place": 1, "advantage": 0.5, "log_probs": [-0.25]},
        {"place": 2, "advantage": "1"},
        {"place": []},
        1,
    ]
    (run / "samples" / "0.trainer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in parts))
    damaged: Counter[str] = Counter()
    first, second = read_samples(run, 0, damaged)
    assert (first.place, first.advantage, first.tokens[0].trainer, second.place) == (1, 0.5, -0.25, 2)
    assert damaged == {"samples/0.jsonl": len(wrong), "samples/0.trainer-0.jsonl": 3}
    assert read_with("ui", run)[1] is None
    (page,) = open_runs([run])
    page.samples(0)
    assert page.summary()["damaged"] == {"samples": len(wrong) + 3}


def test_each_line_of_a_journal_may_be_lost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rollouts=1)
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    for lost in range(len(lines)):
        (run / "events.jsonl").write_text("".join(lines[:lost] + lines[lost + 1 :]))
        for reader in ("doctor", "watch", "ui", "trace", "engines"):
            error = read_with(reader, run)[1]
            assert error is None or "got none in" in error, (reader, lines[lost], error)


def test_an_engine_whose_start_was_lost_has_its_weights(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(line for line in lines if '"kind": "engine"' not in line))
    engines = RunEngines()
    for event in read_events(run):
        engines.add(event)
    assert (engines.engines["engine-0"].state, engines.engines["engine-0"].version) == (UNKNOWN, 2)


def test_escape_codes_of_a_journal_reach_no_terminal(tmp_path: Path) -> None:
    evil = "\x1b[31m\x1b]0;title\x07\x1b[2J\r\ud800 text"
    run = write_run(tmp_path / "run", error=RuntimeError(evil))
    head = {"time": 1.0, "source": evil, "kind": "engine", "model": evil, "engine": evil}
    more = [head | {"state": state, "address": evil, "place": evil} for state in ("starting", "dead")]
    more += [{"time": 2.0, "source": "rollout", "kind": "dropped", "groups": [1], "reason": evil}]
    more += [{"time": 2.0, "source": "rollout", "kind": "warning", "logger": evil, "text": evil}]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in more)
    write_environment(run, ["vime", evil], {"VIME_X": evil.replace("\ud800", "")})
    for reader in ("doctor", "engines", "compare", "watch"):
        text, error = read_with(reader, run)
        assert error is None and not {"\x1b", "\x07", "\r"} & set(text), (reader, text)


def test_secrets_of_an_older_run_are_masked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rm_url="http://h?token=h1dden", error=RuntimeError("Bearer h1dden"))
    other = write_run(tmp_path / "other", rm_url="http://h?token=h1dden-2")
    raw = (run / "events.jsonl").read_text().replace("Bearer ***", "Bearer h1dden")
    (run / "events.jsonl").write_text(raw)
    (run / "environment.json").write_text(json.dumps({"host": {"auth": "h1dden"}}))
    assert "h1dden" in raw and "h1dden" in (run / "config.json").read_text()
    assert read_with("ui", run)[1] is None and "h1dden" not in (tmp_path / "page.html").read_text()
    assert "h1dden" not in "\n".join(comparison(str(run), str(other)))
