"""Tests the files of `vime bench`: the meaning of their keys, the commands that follow, and their errors."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from bench_cases import packages
from make_model import ARCHITECTURES
from make_model import main as make_model
from switch_bench import command
from switch_bench.command import main
from switch_bench.planning import make_plan
from switch_bench.settings import Model, Switch, read_settings

from vime.cli import main as vime

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = [
    pytest.param(path, marks=() if path.stem == "tiny-cpu" else pytest.mark.slow, id=path.stem)
    for path in sorted((ROOT / "examples" / "bench").glob("*.yaml"))
]
TINY, FOUR = (str(ROOT / "examples" / "bench" / f"{name}.yaml") for name in ("tiny-cpu", "qwen3-4b-gsm8k"))
SMALL = """
name: small
model: {arch: qwen3-tiny, layers: 1}
data: arithmetic
flags: {device: cpu, colocate: true, balance-data: false, train-env-vars: {A: "1"}, lr: 1e-3}
switch: {field: rlk_fast, baseline: off, rl_kernel: strict}
steps: 4
presets:
  long: {steps: 40, repeats: 3, flags: {lr: 1e-4, balance_data: true, weight-decay: 0.1}}
  own: {model: {path: somewhere}, data: file.jsonl, claim: mine}
"""


def in_this_process(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs scripts/make_model.py in this process, without the seconds of a start."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = make_model(words[2:]) or 0
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(words, status, "", said.getvalue())


@pytest.fixture(autouse=True)
def models_without_a_process(monkeypatch):
    """docs/benchmarks.md and tests/e2e/runs/test_bench_tiers.py start it in a process, as a user does."""
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=in_this_process))
    monkeypatch.setattr("slime.tracking.environment.installed_packages", packages)
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(folder: Path, text: str = SMALL) -> Path:
    path = folder / "small.yaml"
    path.write_text(text)
    return path


def changed(folder: Path, **values: object) -> Path:
    """Writes the file with other values; None removes a key."""
    small = yaml.load(SMALL, yaml.BaseLoader)  # every word stays a text
    content = {**small, "model": {"arch": "qwen3-tiny"}, "steps": 4, "presets": None, **values}
    return write(folder, yaml.safe_dump({k: v for k, v in content.items() if v is not None}, sort_keys=False))


def test_a_file_its_defaults_and_words_that_yaml_takes_for_booleans(tmp_path):
    found = read_settings(write(tmp_path))
    assert (found.name, found.claim, found.steps, found.warm_up, found.repeats) == ("small", "small", 4, 1, 1)
    assert found.model == Model(arch="qwen3-tiny", layers=1)
    assert found.switch == Switch("rlk_fast", "off", "strict")
    assert found.flags == (
        *("--device", "cpu", "--colocate", "--no-balance-data"),
        *("--train-env-vars", '{"A": "1"}', "--lr", "1e-3"),
    )
    assert read_settings(changed(tmp_path, switch=None)).switch == Switch("rlk_fast", "off", "auto")
    listed = read_settings(changed(tmp_path, flags=["--lr 1e-3", "--prompt 'a b'"], presets=None))
    assert listed.flags == ("--lr", "1e-3", "--prompt", "a b")


def test_presets_replace_and_add_flags_and_the_command_line_wins(tmp_path):
    path = write(tmp_path)
    long = read_settings(path, "long")
    assert (long.steps, long.repeats, long.warm_up) == (40, 3, 1)
    assert long.flags == (
        *("--device", "cpu", "--colocate", "--balance-data"),
        *("--train-env-vars", '{"A": "1"}', "--lr", "1e-4", "--weight-decay", "0.1"),
    ), "each flag once"
    own = read_settings(path, "own")
    assert (own.model, own.data, own.steps) == (Model(path="somewhere"), "file.jsonl", 4)
    line = long.with_line(steps=3, model="other", flags=["--lr", "1e-5"])
    assert (line.steps, line.repeats, line.model, line.data) == (3, 3, Model(path="other"), "arithmetic")
    assert line.flags[-2:] == ("--lr", "1e-5")


def test_a_preset_may_list_flags_and_change_the_sides(tmp_path):
    path = write(tmp_path, SMALL + "  typed: {flags: [--lr 1e-5]}\n")
    listed = read_settings(path, "typed")
    assert listed.flags == (*read_settings(path).flags, "--lr", "1e-5"), "a list comes after"
    switched = SMALL + "  eager: {switch: {baseline: auto}, claim: strict or not}\n"
    assert read_settings(write(tmp_path, switched), "eager").switch == Switch("rlk_fast", "auto", "strict")
    with pytest.raises(ValueError, match="preset's switch must have keys of baseline, rl_kernel, got field"):
        read_settings(write(tmp_path, switched.replace("{baseline: auto}", "{field: lr}")), "eager")
    with pytest.raises(ValueError, match="preset eager must say `claim`, got none"):
        read_settings(write(tmp_path, switched.replace(", claim: strict or not", "")), "eager")


def switch(field: str, baseline: object, rl_kernel: object) -> dict[str, object]:
    return {"field": field, "baseline": baseline, "rl_kernel": rl_kernel}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 3}, "small.yaml must have keys of name, claim, model, .*, got step; did you mean steps?"),
        ({"data": None}, "small.yaml must say `data`, got name, model"),
        ({"name": "a/b"}, "name must be of letters, digits"),
        ({"steps": True}, "steps must be a whole number, 1 or more, got True"),
        ({"steps": 0}, "steps must be a whole number, 1 or more, got 0"),
        ({"warm_up": 4}, "steps must be more than the warm-up, got 4 and warm_up 4"),
        ({"repeats": 0}, "repeats must be a whole number, 1 or more, got 0"),
        ({"model": {"arch": "a", "path": "b"}}, "model must say `arch` or `path`, one of them"),
        ({"model": {"path": "b", "layers": 2}}, "model.layers must go with `arch`"),
        ({"model": {"arch": "a", "layer": 2}}, "model must have keys of .*, got layer; did you mean layers?"),
        ({"model": "Qwen3-4B"}, "model must be a mapping, got 'Qwen3-4B'"),
        ({"switch": {"field": "rlk_fast"}}, "switch must say field, baseline and rl_kernel, got field"),
        (
            {"switch": switch("rlk_fats", 1, 2)},
            "switch.field must be a field .* got rlk_fats; did you mean rlk_fast?",
        ),
        (
            {"switch": switch("rlk_fast", "off", "off")},
            "switch must differ between the sides, got off for both",
        ),
        ({"flags": {"num-rollout": 3}}, "--num-rollout must be left out of the flags, got it; `steps` of"),
        ({"flags": ["--save=x"]}, "--save must be left out of the flags, got it; every run starts from the"),
        ({"flags": {"rlk-fast": "off"}}, "--rlk-fast must be left out of the flags, got it; it is what the"),
        ({"flags": {"enable-rl-kernel": True}}, "--enable-rl-kernel must be left out of the flags"),
        ({"flags": {"debug-train-only": False}}, "--debug-train-only must be left out of the flags"),
        ({"presets": {"a": {"data": "b.jsonl"}}}, "preset a must say `claim`, got none; with a model, data"),
        ({"presets": {"a": {"name": "b"}}}, "preset a must have keys of claim, .*, got name"),
    ],
)
def test_what_a_file_must_not_say(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        read_settings(changed(tmp_path, **values), "a" if "presets" in values else None)


def test_files_presets_and_command_lines_that_are_not_there(tmp_path):
    path = write(tmp_path)
    with pytest.raises(
        ValueError, match="--preset must be one of long, own .*, got lonng; did you mean long"
    ):
        read_settings(path, "lonng")
    with pytest.raises(ValueError, match="BENCHMARK must be a YAML file, got none.yaml"):
        read_settings(Path("none.yaml"))
    with pytest.raises(ValueError, match="must be valid YAML"):
        read_settings(write(tmp_path, "a: [1"))
    with pytest.raises(ValueError, match="the command line: --load must be left out of the flags"):
        read_settings(write(tmp_path)).with_line(flags=["--load", "x"])


def flag(argv: tuple[str, ...], name: str) -> str:
    """Returns the value that wins."""
    return [value for word, value in itertools.pairwise(argv) if word == name][-1]


def test_whole_steps_are_the_sides_in_turn_that_differ_in_the_switch(tmp_path):
    plan = make_plan("e2e", read_settings(write(tmp_path), "long"), tmp_path / "out")
    names = ["baseline-0", "rl_kernel-0", "baseline-1", "rl_kernel-1", "baseline-2", "rl_kernel-2"]
    assert [run.name for run in plan.runs] == names and plan.rollouts is None
    for run in plan.runs:
        assert run.command[:4] == [sys.executable, "-m", "vime", "train"]
        assert flag(run.argv, "--rlk-fast") == {"baseline": "off", "rl_kernel": "strict"}[run.side]
        assert flag(run.argv, "--run-dir") == str(tmp_path / "out" / "runs" / run.name)
    for i, (baseline, fast) in enumerate(zip(plan.runs[::2], plan.runs[1::2], strict=True)):
        own = {"off", "strict", str(baseline.run_dir), str(fast.run_dir)}
        assert [w for w in fast.argv if w not in own] == [w for w in baseline.argv if w not in own]
        seeds = ["--seed", str(1234 + i), "--rollout-seed", str(42 + i)] if i else []
        assert [w for w in fast.argv[-len(seeds) - 4 :] if w in seeds] == seeds
    assert flag(run.argv, "--num-rollout") == "40" and flag(run.argv, "--lr") == "1e-4"
    model = tmp_path / "out" / "model-qwen3-tiny-1-layers"
    assert flag(run.argv, "--hf-checkpoint") == str(model)
    assert flag(run.argv, "--prompt-data") == str(model / "arithmetic" / "train.jsonl")
    assert plan.model_command[2:] == [
        *("--arch", "qwen3-tiny", "--layers", "1", "--arithmetic", "--random", str(model))
    ]


def test_a_module_trains_on_what_one_run_saved(tmp_path):
    plan = make_plan("module", read_settings(write(tmp_path), "own"), tmp_path)
    assert plan.model_command is None and [run.name for run in plan.runs] == ["baseline-0", "rl_kernel-0"]
    saved = str(tmp_path / "rollouts" / "{rollout_id}.pt")
    assert "--debug-rollout-only" in plan.rollouts.argv and plan.rollouts.side is None
    assert flag(plan.rollouts.argv, "--save-debug-rollout-data") == saved
    assert flag(plan.rollouts.argv, "--rlk-consistency") == "off"
    assert [flag(run.argv, "--load-debug-rollout-data") for run in plan.runs] == [saved, saved]
    assert flag(plan.runs[0].argv, "--hf-checkpoint") == "somewhere"
    assert [path.name for path in plan.saved] == ["0.pt", "1.pt", "2.pt", "3.pt"]


@pytest.mark.parametrize("path", EXAMPLES)
def test_every_example_and_preset_has_flags_that_a_run_takes(path, tmp_path, capfd, monkeypatch):
    """The shape in the file's name replaces a user's own model, and two lines replace the user's data."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own"
    arch = next((name for name in ARCHITECTURES if path.stem.startswith(name)), "qwen3-tiny")
    make_model(["--arch", arch, "--no-weights", str(own)])
    columns = '{"prompt": "a", "label": "3", "question": "a", "answer": "3"}\n'
    (tmp_path / "data.jsonl").write_text(columns * 2)
    presets = yaml.safe_load(path.read_text()).get("presets", {})
    for preset in [None, *presets]:
        benchmark = read_settings(path, preset)
        line = ["plan", str(path), *(() if preset is None else ("--preset", preset))]
        if benchmark.model.path is not None:
            line += ["--model", str(own), "--data", str(tmp_path / "data.jsonl")]
        capfd.readouterr()
        assert main(line) == 0
        runs = [words for words in commands(capfd.readouterr().out) if words[:3] == ["-m", "vime", "train"]]
        assert len(runs) == 1 + 4 * benchmark.repeats
        assert not (tmp_path / "runs").exists()


def commands(plan: str) -> list[list[str]]:
    """Returns the arguments of the interpreter as bash would pass them, for each line of a plan."""
    said = plan.replace(sys.executable, "say")
    done = subprocess.run(
        ["bash", "-euc", "say() { printf '%s\\0' \"$@\"; printf '\\n'; }\n" + said],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\0")[:-1] for line in done.stdout.splitlines()]


def test_commands_of_a_plan_are_the_commands_of_its_runs(tmp_path):
    """bash reads the commands. Their values contain text that bash would split or expand, or that looks like a flag."""
    tricky = ["--apply-chat-template-kwargs", '{"a b": "$HOME \'x\'"}', "--lr", "-1e-6", "--label-key", "*"]
    benchmark = read_settings(Path(TINY)).with_line(steps=2, repeats=2, flags=tricky)
    for tier in ("module", "e2e"):
        plan = make_plan(tier, benchmark, tmp_path / "a b")
        text = "\n".join(plan.lines())
        assert commands(text)[1:] == [run.command[1:] for run in plan.all_runs()]
        secret = make_plan(tier, benchmark.with_line(flags=["--wandb-key", "hush"]), tmp_path)
        assert "hush" in secret.runs[0].command and "hush" not in "\n".join(secret.lines())
        assert text.count("--apply-chat-template-kwargs") == 1


def test_a_plan_finds_wrong_flags_and_wrong_models(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert vime(["bench", "plan", TINY, "--", "--rollout-bach-size", "3"]) == 2
    err = capfd.readouterr().err
    assert "vime bench: --rollout-bach-size is not a known flag; did you mean --rollout-batch-size?" in err
    deep = changed(tmp_path, model={"arch": "qwen3-tiny", "layers": 9})
    assert vime(["bench", "plan", str(deep)]) == 2
    assert "--layers must lie in [1, 2], the depth of qwen3-tiny, got 9" in capfd.readouterr().err
    columns = tmp_path / "columns.jsonl"
    columns.write_text('{"question": "1 + 1", "answer": "2"}\n')
    assert vime(["bench", "plan", TINY, "--data", str(columns)]) == 2
    assert "columns.jsonl:1: column 'prompt' is missing" in capfd.readouterr().err
    named = ["--input-key", "question", "--label-key", "answer"]
    assert vime(["bench", "plan", TINY, "--data", str(columns), "--", *named]) == 0
    assert "columns.jsonl: 1 prompt = " in capfd.readouterr().out
    assert vime(["bench", "plan", FOUR, "--model", str(tmp_path), "--data", "absent.jsonl"]) == 2
    found = capfd.readouterr()
    assert "must be a prompt file that exists, got absent.jsonl; name yours with --data" in found.err
    assert found.out == ""  # a wrong plan prints nothing to copy
    assert not (tmp_path / "runs").exists()


def test_a_plan_tells_memory_and_notes_as_vime_plan_does(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ["bench", "plan", TINY, "--", "--seq-length", "64", "--offload-train"]
    assert vime([*line, "--rl-kernel-workspace-mib", "1"]) == 0
    out = capfd.readouterr().out
    _, whole_steps = out.split("# e2e: ")
    (found,) = [words for words in commands(f"# {whole_steps}") if words[-1].endswith("runs/baseline-0")]
    make_model(["--arch", "qwen3-tiny", "--no-weights", "--arithmetic", found[4]])
    assert vime(["plan", *found[3:]]) == 0
    plan = capfd.readouterr().out
    peak = re.search(r"^  peak +(\S+ MiB)", plan, re.M)[1]
    weights = re.search(r"Memory of an engine, per GPU\n  weights +(\S+ MiB)", plan)[1]
    (leaves,) = re.findall(r"^  (between trainings .*)$", plan, re.M)
    for side in ("baseline", "rl_kernel"):
        memory = f"a trainer rank {peak} at its peak; an engine, per GPU, weights {weights}"
        assert f"# {side}: {memory}" in whole_steps
        assert f"# {side}: {leaves}\n" in whole_steps
    notes = plan.partition("Notes\n")[2].splitlines()
    assert notes and all(out.count(f"# note: {note.strip()}\n") == 2 for note in notes), notes


def test_a_plan_for_gpus_that_are_not_here(tmp_path, capfd):
    line = ["bench", "plan", FOUR, "--preset", "smoke"]
    assert vime([*line, "--gpu-memory-gib", "110"]) == 1, "baseline alone is too large"
    out = capfd.readouterr().out
    assert re.search(r"^# baseline: does not fit a GPU of 110 GiB: ", out, re.M)
    assert out.count("# rl_kernel: fits a GPU of 110 GiB\n") == 2  # module and e2e
    assert out.endswith("# the flags are good, but something does not fit GPUs of 110 GiB\n")
    assert vime([*line, "--gpu-memory-gib=141"]) == 0
    assert capfd.readouterr().out.endswith("# the flags are good\n")
    assert vime(["bench", "plan", TINY, "--gpu-memory-gib", "80"]) == 2
    assert "--gpu-memory-gib must go with --device cuda, got --device cpu" in capfd.readouterr().err


def test_commands_that_are_not_there(capsys):
    assert vime(["bench", "modul", "x"]) == 2
    assert "one of op, module, e2e, plan, report, plot, got modul; did you mean" in capsys.readouterr().err
    assert vime(["bench"]) == 0
    assert "vime bench e2e BENCHMARK" in capsys.readouterr().out


def test_operators_go_through_rl_kernel_bench(tmp_path, capsys):
    assert vime(["bench", "op", "masked", "--device", "cpu", "--out", str(tmp_path / "o")]) == 0
    assert "masked" in (tmp_path / "o" / "operators.json").read_text()


def test_a_title_says_whose_model_and_data_it_is(tmp_path):
    """The title leaves out the depth and weights of the model that it replaces."""
    file, mine = Path(FOUR), str(tmp_path / "mine")
    own = read_settings(file).with_line(model=mine, data="x/d.jsonl")
    assert own.claim == f"{read_settings(file).claim}; here with model mine and data d.jsonl"
    shallow = read_settings(file, "shallow")
    assert shallow.with_line(model=mine).claim == "qwen3-4b-gsm8k shallow; here with model mine"
    assert shallow.with_line(steps=5).claim == shallow.claim
