"""Tests `vime plan --search`: layouts in the order of their time, their memory, lengths, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from search_models import DENSE, experts

from slime.config import Config
from slime.hardware import HARDWARE
from slime.plan.fit import Fit, MachineSizes
from slime.plan.units import GIB
from vime.backends import parse_config
from vime.memory.lines import whole_fit
from vime.plan.command import main
from vime.plan.search import command
from vime.plan.search.command import LAYOUT, SHOWN
from vime.plan.search.layouts import COARSE, FINE, find_remainders, list_layouts, spell, with_layout
from vime.plan.search.lengths import read_lengths
from vime.plan.search.state_check import StateCheck
from vime.plan.search.step_time import GpuLayout, Model, StepWork, add_moves, predict


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return write_run(tmp_path, DENSE)


def write_run(folder: Path, model: Model) -> list[str]:
    (folder / "config.json").write_text(json.dumps(model.hf))
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    return [
        *(
            "--hf-checkpoint",
            str(folder),
            "--prompt-data",
            str(folder / "prompts.jsonl"),
            "--rm-type",
            "math",
        ),
        *(
            "--input-key",
            "prompt",
            "--label-key",
            "label",
            "--num-rollout",
            "1",
            "--rollout-batch-size",
            "32",
        ),
        *(
            "--n-samples-per-prompt",
            "8",
            "--rollout-max-response-len",
            "1024",
            "--run-dir",
            str(folder / "run"),
        ),
    ]


def steps(text: str) -> list[float]:
    return [
        float(line.split()[1]) for line in text.splitlines() if line[:1].isdigit() and " s a step: " in line
    ]


def test_the_fastest_layouts_that_fit_come_first(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--search", "8", "--gpu", "h100", "--lengths", "200:500:3,200:4000:1", *flags]) == 0
    text = capsys.readouterr().out
    assert len(steps(text)) == SHOWN and steps(text) == sorted(steps(text))
    assert "on average 200 + 1,375 tokens, the longest 4,200" in text
    assert text.count("most time: rollout") == SHOWN and "--rollout-num-gpus-per-engine" in text


def test_a_layout_for_1024_gpus_is_simulated_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = write_run(tmp_path, experts(48))
    more = ["--max-staleness", "1", "--simulate", "--plot", str(tmp_path / "time.png")]
    assert main(["--search", "1024", "--gpu", "h200", "--lengths", "200:1000", *more, *flags]) == 0
    text = capsys.readouterr().out
    assert "simulation of 10 steps" in text and "engines: decoding" in text
    assert (tmp_path / "time.png").read_bytes()[1:4] == b"PNG"


def test_the_30b_fits_four_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The 400 fastest layouts do not have room for the trainer's state."""
    flags = [*write_run(tmp_path, experts(48)), "--host-memory-gib", "503"]
    assert main(["--search", "4", "--gpu", "h200", "--lengths", "14:512", *flags]) == 0
    assert len(steps(capsys.readouterr().out)) == SHOWN


CRITIC = [
    *("--advantage-estimator", "ppo", "--critic-num-nodes", "1", "--critic-num-gpus-per-node", "4"),
    *("--global-batch-size", "256"),
]


@pytest.mark.parametrize(
    ("model", "gib", "more"), [(experts(48), 139.8, []), (DENSE, 60, CRITIC)], ids=["experts", "critic"]
)
def test_a_layout_whose_state_is_too_large_does_not_fit(
    tmp_path: Path, model: Model, gib: float, more: list[str]
) -> None:
    """The state of a critic on separate GPUs is not on the policy's GPUs."""
    gpu = HARDWARE["h200"]
    c = parse_config([*write_run(tmp_path, model), "--gpu", "h200", *LAYOUT, *more])
    machine = MachineSizes(gib * GIB, 503 * GIB)
    layouts = list(list_layouts(model, gpu, 4, 1280, 0, find_remainders(c)))
    check = StateCheck(c, model, gpu, machine)
    impossible = [one for one in layouts if not check.is_possible(one)]
    assert {one.remainders for one in impossible} == {False, True} and len(impossible) < len(
        layouts
    ) == check.count
    for layout in impossible[::41]:
        assert whole_fit(with_layout(c, gpu, layout), model.hf, machine).over > 0, layout


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ([], (False, True)),
        (["--optimizer-cpu-offload"], (False, True)),
        (["--use-precision-aware-optimizer"], (True,)),
        (["--use-precision-aware-optimizer", "--fp32"], (False,)),
        (["--optimizer", "muon"], (False,)),
    ],
)
def test_kinds_of_main_weights(tmp_path: Path, flags: list[str], kinds: tuple[bool, ...]) -> None:
    c = parse_config([*write_run(tmp_path, DENSE), "--gpu", "h200", *LAYOUT, *flags])
    assert find_remainders(c) == kinds


def test_the_users_flags_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --no-use-precision-aware-optimizer, no layout has remainders. --gpu-memory-gib is in GiB."""
    flags = [*write_run(tmp_path, DENSE), "--host-memory-gib", "503", "--gpu-memory-gib", "88"]
    for more, wanted in (([], True), (["--no-use-precision-aware-optimizer"], False)):
        assert main(["--search", "1", "--gpu", "h200", "--lengths", "14:512", *more, *flags]) == 0
        text = capsys.readouterr().out
        assert ("--use-precision-aware-optimizer" in text) == wanted and " of 88.0 GiB" in text


def test_a_fine_grid_follows_if_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A host of 60 GiB is too small for all of Adam, and a GPU of 42 GiB for three quarters of Adam. The run decides
    which parts of the state leave the GPU."""
    flags = [*write_run(tmp_path, DENSE), "--host-memory-gib", "60", "--gpu-memory-gib", "42"]
    assert main(["--search", "1", "--gpu", "h200", "--lengths", "14:512", *flags]) == 0
    text = capsys.readouterr().out
    c = parse_config([*flags[:-4], "--gpu", "h200", *LAYOUT])
    grids = [list(list_layouts(DENSE, HARDWARE["h200"], 1, 526, 0, (False, True), g)) for g in (COARSE, FINE)]
    assert text.startswith(f"1 h200: {sum(map(len, grids)):,} layouts, ")
    assert len(steps(text)) == 1 and text.count("--optimizer-offload-fraction 0.8\n") == 1
    assert "--offload-train" not in text
    machine = MachineSizes(42 * GIB, 60 * GIB)
    coarse, fine = (
        [whole_fit(with_layout(c, HARDWARE["h200"], one), DENSE.hf, machine) for one in grid[::7]]
        for grid in grids
    )
    assert min(found.over for found in coarse) > 0 > min(found.over for found in fine)


def test_the_time_of_a_move_decides_the_order(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of the faster layout moves 51 GB in each direction, which takes 2 s. Both layouts are found, although
    the search has planned as many layouts as it may."""
    gpu, machine = HARDWARE["h200"], MachineSizes(140 * GIB, 500 * GIB)
    c = parse_config([*flags, "--gpu", "h200", *LAYOUT])
    layouts = [GpuLayout(2, 2, 1, True, offload=None), GpuLayout(2, 1, 2, True, tp=2, offload=None)]
    work = StepWork(DENSE, ((14, 256),) * 256)

    def planned(c: Config, hf: object, machine: MachineSizes) -> Fit:
        return Fit((), {}, None, moved=0.0 if c.megatron.tensor_model_parallel_size == 2 else 51e9)

    monkeypatch.setattr(command, "whole_fit", planned)
    monkeypatch.setitem(command.MOST_CHECKED, FINE, 2)
    check = StateCheck(c, DENSE, gpu, machine)
    before = [command.predict_layout(c, DENSE, gpu, layout, work, None).step for layout in layouts]
    assert before[0] < before[1] < before[0] + 2
    found = command._search_grid(c, gpu, iter(layouts), work, check, FINE, machine).found
    assert [one.layout.tp for one in found] == [2, 1]
    assert [one.prediction.step for one in found] == pytest.approx([before[1], before[0] + 2])


def test_parts_that_leave_a_gpu_take_time() -> None:
    gpu, layout = HARDWARE["h200"], GpuLayout(1, 1, 1, True, offload=None)
    before = predict(DENSE, gpu, layout, [(14, 256)] * 8, rollout_s=0.0)
    after = add_moves(before, 51e9)
    assert "offload" not in before.parts and after.parts["offload"] == pytest.approx(2.0)
    assert after.step == pytest.approx(before.step + 2)


def test_no_layout_of_too_few_gpus_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = write_run(tmp_path, experts(48))
    assert main(["--search", "1", "--gpu", "h100", *flags]) == 1
    text = capsys.readouterr().out
    assert (
        "no layout of this search fits; the closest needs" in text
        and "too much for a GPU of 79.18 GiB" in text
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--search", "0", "--gpu", "h100"], "must be a number of GPUs above 0, got 0"),
        (["--search", "8"], "must go with --gpu, got none"),
        (["--search", "8", "--gpu", "h900"], "h900"),
        (["--search", "8", "--gpu", "h100", "--lengths", ""], "must have lengths, got none"),
        (["--search", "8", "--gpu", "h100", "--lengths", "200:x"], "must be PROMPT:RESPONSE"),
        (["--search", "8", "--gpu", "h100", "--lengths", "0:5"], "must be PROMPT:RESPONSE"),
    ],
)
def test_bad_input(flags: list[str], argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main([*argv, *flags])


def test_experts_that_do_not_divide_are_no_layout() -> None:
    gpu = HARDWARE["h100"]
    found = list(list_layouts(experts(48), gpu, 6, 1000, 0))
    assert found and all(128 % layout.ep == 0 and layout.trainer_gpus % layout.ep == 0 for layout in found)
    assert {layout.gpus for layout in list_layouts(DENSE, gpu, 24, 1000, 1)} == {24}


def test_a_layout_is_spelled_as_flags() -> None:
    layout = GpuLayout(8, 4, 2, False, tp=2, recompute=True, ahead=1, host_adam=0.25, remainders=True)
    text = spell(HARDWARE["h100"], layout)
    for flag in (
        "--rollout-num-gpus 8",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--max-staleness 1",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.25 --use-precision-aware-optimizer",
    ):
        assert flag in text


def test_lengths_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "metrics.jsonl").write_text(
        '{"rollout/total_lengths": 110.0, "rollout/response_len/mean": 60.0}\n'
    )
    rows = [{"version": 1}, {"tokens": [1] * 20}, {"tokens": [1] * 100}]
    (tmp_path / "samples" / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_lengths(str(tmp_path), 1, 1)
    assert found.bins == ((50, 20, 0.5), (50, 100, 0.5))
    with pytest.raises(ValueError, match="must have lengths, got none"):
        read_lengths(str(tmp_path / "samples"), 1, 1)
