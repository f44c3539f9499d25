"""Tests the data that `vime ui` reads from run directories: state, curves, timeline, samples, settings; and its
errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from page_runs import HOSTILE, make_run, make_samples

from slime.tracking.events import Events
from slime.tracking.kinds import VERSION
from slime.tracking.samples import write_samples
from slime.types import Sample
from vime.view.page.command import open_runs
from vime.view.page.run_data import RunData
from vime.view.page.sample_rows import COLUMNS


def opened(run_dir: Path) -> RunData:
    (run,) = open_runs([run_dir])
    return run


def named(row: list[object]) -> dict[str, object]:
    return dict(zip(COLUMNS, row, strict=True))


@pytest.mark.parametrize("state", ["finished", "running", "failed"])
def test_the_state_and_the_curves_of_a_run(tmp_path: Path, state: str) -> None:
    run = opened(make_run(tmp_path / "run", state=state))
    summary = run.summary()
    assert (summary["name"], summary["state"], summary["rollout"], summary["rollouts"]) == (
        "run",
        state,
        2,
        5,
    )
    assert summary["cause"] == ("the loss must be finite, got nan" if state == "failed" else "")
    curves = run.curves()
    assert curves["rollout/raw_reward"] == {
        "unit": "rollout",
        "steps": [0, 1, 2],
        "values": [0, 1 / 3, 2 / 3],
    }
    assert curves["train/loss"] == {
        "unit": "optimizer step",
        "steps": [0, 1, 2],
        "values": [1.0, None, 1 / 3],
    }


def test_a_condition_that_keeps_a_run_from_learning_is_in_its_state(tmp_path: Path) -> None:
    run = opened(make_run(tmp_path / "run", state="running"))
    concern = {"name": "all rewards 0", "rollout": 2, "text": "each reward is 0", "remedy": "look at samples"}
    driver = Events("driver", str(run.dir))
    driver.add("concern_begin", **concern)
    assert run.summary()["concerns"] == [concern]
    driver.add("concern_end", **(concern | {"rollout": 5}))
    driver.close()
    assert opened(run.dir).summary()["concerns"] == []


def test_a_driver_that_is_killed_is_seen_without_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.view.page.run_data.LOOK_EVERY_S", 0.05)
    with subprocess.Popen(["sleep", "60"]) as driver:
        run = opened(make_run(tmp_path / "run", state="running", pid=driver.pid))
        assert run.summary()["state"] == "running"
        driver.kill()
    until = time.monotonic() + 20
    while run.summary()["state"] == "running":
        assert time.monotonic() < until
        time.sleep(0.05)
    assert "ended without a word" in str(run.summary()["cause"])


def test_the_timeline_has_a_lane_for_each_process_and_device(tmp_path: Path) -> None:
    timeline = opened(make_run(tmp_path / "run")).timeline()
    lanes, names = timeline["lanes"], timeline["names"]
    assert lanes == [["driver", ""], ["rollout", ""], ["engine-0", ""], ["trainer-0", "cpu"]]
    spans = [
        (lanes[lane][0], row, names[name], rollout) for lane, row, name, _, _, rollout in timeline["spans"]
    ]
    for step in range(3):
        assert ("rollout", 0, "rollout", step) in spans
        assert ("trainer-0", 0, "train", step) in spans
        assert ("trainer-0", 1, "actor_train", step) in spans  # one span contains the other
    assert {name for source, _, name, _ in spans if source == "engine-0"} == {"starting", "serving"}
    assert all(0 <= begin <= end <= timeline["end"] for _, _, _, begin, end, _ in timeline["spans"])
    marks = [(lanes[lane][0], kind, text) for lane, _, kind, text in timeline["marks"]]
    assert marks.count(("rollout", "dropped", "dropped: zero_std")) == 3
    assert ("engine-0", "weights", "has version 3 of the weights") in marks
    assert [step[0] for step in timeline["steps"]] == [0, 1, 2]


def test_an_engine_that_died_leaves_a_gap_and_a_mark(tmp_path: Path) -> None:
    engine = {
        "source": "engines",
        "kind": "engine",
        "model": "policy",
        "engine": "engine-0",
        "address": "",
        "place": "",
    }
    states = enumerate(["starting", "serving", "dead", "starting"], start=10)
    lines = [{"time": float(time)} | engine | {"state": state, "version": None} for time, state in states]
    lines.append({"time": 20.0, "source": "driver", "kind": "error", "type": "E", "text": "gone"})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timeline = opened(tmp_path).timeline()
    spans = [(timeline["names"][name], begin, end) for _, _, name, begin, end, _ in timeline["spans"]]
    assert spans == [("starting", 0.0, 1.0), ("serving", 1.0, 2.0), ("starting", 3.0, 10.0)]
    assert timeline["marks"][0][1:] == [2.0, "dead", "the engine is dead"]


def test_rows_of_samples_come_in_parts_and_again_when_the_trainer_has_written(tmp_path: Path) -> None:
    run = opened(make_run(tmp_path / "run"))
    make_samples(run.dir, 0, [f"prompt {i}" for i in range(4)])
    make_samples(run.dir, 1, ["one", "two"], trained=False)
    first = run.samples(0)
    rows = {rollout: list(map(named, found)) for rollout, found in first["rows"].items()}
    assert (first["more"], sorted(rows), len(rows[0]), len(rows[1])) == (False, [0, 1], 4, 2)
    row = rows[0][3]
    assert (row["place"], row["reward"], row["tokens"], row["oldest"], row["turns"]) == (3, 1.0, 6, 0, 1)
    assert row["gap"] == pytest.approx(0.03) and row["largest_gap"] == pytest.approx(0.03)
    assert (rows[1][0]["gap"], rows[1][0]["advantage"]) == (None, None)
    assert run.samples(first["serial"])["rows"] == {}
    make_samples(run.dir, 1, ["one", "two"])
    again = run.samples(first["serial"])
    assert list(again["rows"]) == [1] and again["rows"][1][0][COLUMNS.index("advantage")] == 0.5


def test_a_sample_is_found_by_its_text_in_any_case(tmp_path: Path) -> None:
    run = opened(make_run(tmp_path / "run"))
    make_samples(run.dir, 0, ["Zwölf Äpfel", HOSTILE])
    make_samples(run.dir, 3, ["other"])
    assert run.find("ÄPFEL", 0) == {"found": [[0, 0]], "next": None}
    assert run.find("</SCRIPT>", 0) == {"found": [[0, 1]], "next": None}
    assert run.find("sum of", 1) == {"found": [[3, 0]], "next": None}
    assert run.sample(0, 1)["prompt"] == HOSTILE
    with pytest.raises(ValueError, match="place must be the index of a stored sample of rollout 0, got 7"):
        run.sample(0, 7)
    with pytest.raises(ValueError, match="the rollout must have samples, got no"):
        run.sample(2, 0)


def test_the_answers_of_a_group_are_read_together(tmp_path: Path) -> None:
    run = opened(make_run(tmp_path / "run"))
    make_samples(run.dir, 0, ["one", "one", "two", "two", "three"])
    assert [answer["place"] for answer in run.group(0, 1)] == [0, 1]
    first, second = run.group(0, 2)
    assert (first["place"], second["place"], first["group"], first["group_size"]) == (2, 3, 1, 2)
    assert len(second["tokens"]) == 6 and second["advantage"] == -0.5
    assert [answer["prompt"] for answer in run.group(0, 4)] == ["three"]
    with pytest.raises(
        ValueError, match="place must be the index of a stored sample of rollout 0, got 9; choose another"
    ):
        run.group(0, 9)
    path = run.dir / "samples" / "0.jsonl"
    path.write_text(
        re.sub(r'"group": \d+', '"group": null', path.read_text())
    )  # a plug-in's, without numbers
    assert [answer["place"] for answer in run.group(0, 1)] == [1]


def test_a_reward_that_is_a_record_has_its_number_in_the_rows(tmp_path: Path) -> None:
    run = opened(make_run(tmp_path / "run"))
    samples = [Sample(group_index=0, tokens=[0, 1], response_length=1, reward={"score": 0.5, "format": 1})]
    write_samples(run.dir, 0, samples, [0], str, reward_key="score")
    write_samples(run.dir, 1, samples, [0], str)
    rows = run.samples(0)["rows"]
    assert (named(rows[0][0])["reward"], named(rows[1][0])["reward"]) == (0.5, None)


def test_the_row_of_a_conversation_has_its_last_question(tmp_path: Path) -> None:
    run = opened(make_run(tmp_path / "run"))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which day?"}]
    of_sft = [*chat, {"role": "assistant", "content": "Monday"}]
    prompts = [chat, of_sft, [], [{"role": "assistant", "content": None}], "a text"]
    samples = [Sample(group_index=0, tokens=[0, 1], response_length=1, prompt=prompt) for prompt in prompts]
    write_samples(run.dir, 0, samples, range(5), str)
    shown = [named(row)["prompt"] for row in run.samples(0)["rows"][0]]
    assert shown == ["Which day?", "Which day?", "", "", "a text"]


def test_lines_that_are_half_written_are_left_out(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", state="running")
    make_samples(run_dir, 0, ["one", "two"])
    for name in ("events.jsonl", "metrics.jsonl", "samples/0.jsonl"):
        path = run_dir / name
        with path.open("a") as file:
            file.write(path.read_text().splitlines()[-1][:40])
    run = opened(run_dir)
    assert run.summary()["rollout"] == 2 and len(run.curves()["train/loss"]["steps"]) == 3
    assert len(run.samples(0)["rows"][0]) == 2 and len(run.timeline()["steps"]) == 3


def test_a_line_that_is_no_metric_is_counted_and_hides_nothing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "metrics.jsonl").write_text("no metric\n" + (run_dir / "metrics.jsonl").read_text())
    run = opened(run_dir)
    assert run.summary()["damaged"] == {"metrics.jsonl": 1} and len(run.curves()["train/loss"]["steps"]) == 3
    assert len(run.timeline()["steps"]) == 3 and run.settings()["configuration"]


def test_runs_of_other_versions(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old")
    (old / "events.jsonl").unlink()
    run = opened(old)
    assert run.summary()["state"] == "unknown" and "it has no events.jsonl" in run.summary()["cause"]
    assert run.timeline()["spans"] == [] and len(run.curves()["train/loss"]["steps"]) == 3
    new = make_run(tmp_path / "new")
    head = {"time": 1.0, "source": "driver", "kind": "journal", "version": VERSION + 1}
    (new / "events.jsonl").write_text(json.dumps(head) + "\n")
    with pytest.raises(ValueError, match=f"RUN_DIR must have a journal of version {VERSION} or older"):
        opened(new)


def test_directories_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RUN_DIR must have events.jsonl or metrics.jsonl, got neither in"):
        opened(tmp_path)
    with pytest.raises(ValueError, match=r"RUN_DIR must have events.jsonl or metrics.jsonl, got neither in"):
        opened(tmp_path / "no")
    run_dir = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="each RUN_DIR must be given once, got .*run twice"):
        open_runs([run_dir, tmp_path / "other" / ".." / "run"])


def test_runs_with_one_name_get_more_of_their_path(tmp_path: Path) -> None:
    places = [make_run(tmp_path / name / "grpo") for name in ("a", "b")]
    assert [run.name for run in open_runs(places)] == ["a/grpo", "b/grpo"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "events.jsonl"])
def test_a_link_out_of_the_run_is_refused(tmp_path: Path, name: str) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / name).rename(tmp_path / "private")
    (run_dir / name).symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match="the files of a run must be in its directory, got .*private; copy"):
        opened(run_dir)


def test_a_link_out_of_the_samples_is_refused(tmp_path: Path) -> None:
    run = opened(make_run(tmp_path / "run"))
    make_samples(run.dir, 0, ["one"])
    (run.dir / "samples" / "0.jsonl").rename(tmp_path / "private")
    (run.dir / "samples" / "0.jsonl").symlink_to(tmp_path / "private")
    for read in (lambda: run.samples(0), lambda: run.sample(0, 0), lambda: run.find("one", 0)):
        with pytest.raises(ValueError, match="the files of a run must be in its directory"):
            read()


def test_a_folder_stands_for_all_runs_below_it(tmp_path: Path) -> None:
    """Runs are found by name, not inside a run, and not through links. A folder without runs is an error."""
    for name in ("b/grpo", "a", "b/deep/er/one"):
        make_run(tmp_path / "runs" / name)
    make_run(tmp_path / "runs/a/inside")
    (tmp_path / "runs/b/metrics").mkdir()
    (tmp_path / "runs/link").symlink_to(make_run(tmp_path / "other"))
    below = [run.dir.relative_to(tmp_path / "runs").as_posix() for run in open_runs([tmp_path / "runs"])]
    assert below == ["a", "b/deep/er/one", "b/grpo"]
    assert len(open_runs([tmp_path / "runs/b", tmp_path / "other"])) == 3
    with pytest.raises(ValueError, match="each RUN_DIR must be given once"):
        open_runs([tmp_path / "runs", tmp_path / "runs/a"])
    with pytest.raises(
        ValueError, match=r"RUN_DIR must have events.jsonl or metrics.jsonl, got neither in .*/metrics"
    ):
        open_runs([tmp_path / "runs/b/metrics"])


AS_NOBODY = """
import sys, os
import vime.view.page.command as command
os.setgid(65534); os.setuid(65534)
try:
    command.open_runs([sys.argv[1]])
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "config.json"])
def test_a_run_of_another_user_that_may_not_be_read(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are open to their user only
        Path(folder).chmod(0o755)
        run_dir = make_run(Path(folder, "run"))
        (run_dir / name).chmod(0o600)
        run = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(run_dir)], capture_output=True, text=True, check=True
        )
    assert (
        f"RUN_DIR must be a run that this user can read, got no permission for {run_dir / name}" in run.stdout
    )


def test_settings_are_flat_and_without_sections(tmp_path: Path) -> None:
    run = opened(make_run(tmp_path / "run", lr=0.5))
    assert run.settings() == {
        "configuration": {"lr": 0.5, "seed": 1},
        "versions": {
            "git.commit": "abc",
            "packages.torch": "2.11.0",
            "python": None,
            "host": None,
            "cpu": None,
        }
        | {"gpus": None},
    }
    (run.dir / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json must be a JSON object of at most 64 levels, got"):
        run.settings()
