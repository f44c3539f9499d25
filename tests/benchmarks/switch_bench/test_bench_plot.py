"""Tests `vime bench plot`: the six pictures for each form of a record, and its messages for a record that lacks some
data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_cases import full_steps
from matplotlib.image import imread
from switch_bench.command import main
from switch_bench.curves import REWARD
from switch_bench.loose_records import read_runs
from switch_bench.plot import PICTURES, RESULTS, draw_record, records_of
from switch_bench.verdicts import STEP

from slime.tracking.metrics import LOGPROB_DIFF

ROOT = Path(__file__).parents[3]
NAMES = ["mean_step_time", "step_time", "time_breakdown", "peak_memory", "raw_reward", "logprob_diff"]


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_six_pictures_of_two_sides(tmp_path, capsys):
    record = tmp_path / "mine"
    record.mkdir()
    full_steps(repeats=1, steps=4).write(record)
    assert main(["plot", str(record), "--out", str(tmp_path / "out")]) == 0
    files = [tmp_path / "out" / f"mine-{name}.png" for name in NAMES]
    assert sorted((tmp_path / "out").iterdir()) == sorted(files)
    assert all(imread(file).std() > 0.01 for file in files), "an empty picture"
    assert "note" not in capsys.readouterr().out


def test_steps_in_each_form(tmp_path):
    """The forms are lists under names of metrics or instruments, one object per step, and parts in a separate
    object."""
    content = {
        "reward": "gsm8k",
        "medians": {STEP: 9.0},
        "runs": {
            "lists": {STEP: [2.0, 3.0], "trainer_peak_gib": [7.0, 8.0], "abs_dlogp_mean": [0.1]},
            "objects": {"steps": [{"step": 0, STEP: 4.0}, {"step": 1, STEP: 5.0, "perf/new": 1.0}]},
        },
        "sessions": [
            {"runs": [{"side": side, "seed": 0, "rewards": [0.5], "parts": {STEP: [1.0]}} for side in "aa"]}
        ],
        "figures": [{STEP: 3.0}, {STEP: 4.0}],
    }
    runs = read_runs(written(tmp_path / "loose.json", content))
    assert {name: run.steps for name, run in runs.items()} == {
        "lists": [
            {STEP: 2.0, "perf/trainer_peak_gib": 7.0, LOGPROB_DIFF: 0.1},
            {STEP: 3.0, "perf/trainer_peak_gib": 8.0},
        ],
        "objects": [{STEP: 4.0}, {STEP: 5.0}],
        "0, a, seed 0": [{REWARD: 0.5, STEP: 1.0}],
        "0, a, seed 0 (2)": [{REWARD: 0.5, STEP: 1.0}],
    }


def test_what_a_record_lacks_is_named(tmp_path, capsys):
    runs = {f"run {i}": {STEP: [1.0, 2.0], "reward": [0.1, 0.2]} for i in range(7)} | {"none": {STEP: [1.0]}}
    loose = written(tmp_path / "loose.json", {"runs": runs})
    drawn, notes = draw_record(loose, tmp_path / "out")
    pictures = (
        "mean_step_time",
        "mean_step_time-2",
        "step_time",
        "step_time-2",
        "raw_reward",
        "raw_reward-2",
    )
    assert [path.name for path in drawn] == [f"loose-{name}.png" for name in pictures], (
        "six colours a picture"
    )
    assert notes == [
        "Where the time of a step goes: not drawn, as the time of a part was not recorded step by step",
        "Peak memory: not drawn, as a peak of a GPU's memory was not recorded step by step",
        f"Raw reward of none: not drawn, as {REWARD} was not recorded step by step",
        f"Log-prob difference of trainer and engine: not drawn, as {LOGPROB_DIFF} was not recorded step by step",
    ]
    bare = written(tmp_path / "bare.json", {"medians": {STEP: 1.0}})
    with pytest.raises(ValueError, match="RECORD must hold the steps of a run, got none"):
        main(["plot", str(bare), "--out", str(tmp_path / "out")])
    assert "note: bare: no picture, as it holds no step of a run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "RECORD must be given, got none; name one, or give --all"),
        (["no/such.json"], "RECORD must be a directory with bench.json or a JSON file, got no/such.json"),
        (["--all", "."], "--all must be a folder with records, got .; run in the repository's root"),
    ],
)
def test_paths_that_are_no_records(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        main(["plot", *argv])
    assert says in str(error.value)


def test_records_of_other_forms_hold_these_runs():
    """Some records of benchmarks/results hold steps of a number of runs, and some hold no steps."""
    runs = {path.stem: len(read_runs(path)) for path in records_of(ROOT / RESULTS) if path.suffix == ".json"}
    held = {name: count for name, count in runs.items() if count}
    known = {
        "against_trl_cpu": 24,
        "against_trl_h100": 4,
        "audit_h200": 2,
        "colocated_qwen3_4b_h200": 1,
        "curves_h200": 4,
        "features_h200": 13,
        "host_adam_qwen3_4b_h100": 1,
        "smoke_qwen3_4b_h100": 1,
        "smoke_qwen3_4b_h200": 1,
        "stream_reward_cpu": 9,
        "weights_two_h200": 5,
    }
    assert known.items() <= held.items()
    assert not {"operators_h200", "tests_h200", "training_qwen3_4b_h200"} & held.keys(), (
        "medians are no steps"
    )


@pytest.mark.slow
def test_every_record_is_drawn(tmp_path, capsys):
    assert main(["plot", "--all", str(ROOT / RESULTS), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for path in records_of(ROOT / RESULTS):
        if path.is_dir():
            lacks = {p.name for p in PICTURES if f"{path.stem}: {p.caption}: not drawn" in told}
            assert lacks == ({"raw_reward"} if path.stem.startswith("module") else set()), path
            assert {f"{path.stem}-{name}.png" for name in set(NAMES) - lacks} <= {
                f.name for f in tmp_path.iterdir()
            }
