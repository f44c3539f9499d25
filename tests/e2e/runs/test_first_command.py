"""Tests README's first command with two rollouts, in a checkout and from an unpacked source archive."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from checkouts import ROOT, in_shell, linked_checkout, use_this_environment
from train_fixtures import rows

from vime.cli import main
from vime.view.watch_data import WatchedRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.M | re.S)
"""Matches a block of a page: language, title, text."""
COMMAND = "WARM_UP=2 bash scripts/run-tiny-grpo.sh --num-rollout 2"


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = linked_checkout(tmp_path_factory.mktemp("checkout"))
    in_shell(COMMAND, folder)
    return folder / "runs/tiny"


def test_model_warm_up_rollouts_and_plots(tiny_run: Path) -> None:
    assert (tiny_run / "grpo/plots/overview.png").is_file()
    assert sorted(rows(tiny_run / "grpo", "rollout/step")) == [0, 1]


def test_the_views_of_the_run(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(tiny_run / "grpo")
    look = WatchedRun(tiny_run / "grpo").look()
    assert (look.summary.state, look.summary.rollout) == ("finished", 1)
    assert {"reward", "loss", "tokens/s", "gradient norm"} <= look.curves.keys() and "addition" in look.scores
    assert all(one.seconds > 0 and one.tokens and one.sample is not None for one in look.slow) and look.slow
    assert main(["trace", run_dir, "--steps", "1:2", "--out", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"driver", "rollout", "trainer-0", "engines", "groups"} <= {
        event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    spans = {event["name"] for event in events if event["ph"] == "X"}
    assert {"rollout 1", "actor_train 1", "update 1", "weights 1"} <= spans
    assert "actor_train 0" not in spans
    assert main(["compare", run_dir, run_dir]) == 0
    text = capsys.readouterr().out
    assert "No flag differs." in text and "### score: `eval/addition`" in text and "0 [0, 0]" in text


@pytest.fixture(scope="module")
def own(tiny_run: Path) -> tuple[Path, list[str]]:
    """Writes the files of docs/your-own.md into the checkout. Returns the folder and the page's commands for a CPU."""
    folder, commands = tiny_run.parent.parent, []
    for language, title, text in re.findall(FENCE, (ROOT / "docs/your-own.md").read_text()):
        if title.endswith((".py", ".yaml")):
            (folder / title).write_text(text.replace("num-rollout: 20 ", "num-rollout: 2 "))
        elif language == "python":
            subprocess.run([sys.executable, "-c", text], cwd=folder, check=True)
        elif title.startswith("takes ") and "run-tiny-grpo" not in text:
            commands += text.splitlines()
    return folder, commands


def test_a_model_data_and_a_reward_of_ones_own(own: tuple[Path, list[str]]) -> None:
    """The plan of docs/your-own.md reads the page's data, calls its reward, and shows the first prompt."""
    folder, commands = own
    assert [command.split()[:2] for command in commands[:2]] == [["vime", "plan"], ["vime", "train"]]
    shown = in_shell(commands[0], folder)
    for line in (
        "sums.csv: 500 prompts",
        "2 rollouts = 2 optimizer steps",
        "its label: ",
        "its reward, with its own text as the response: 0.0\n",
    ):
        assert line in shown, shown


@pytest.mark.slow
def test_the_run_of_ones_own(own: tuple[Path, list[str]]) -> None:
    """Runs the page with two rollouts, to the answer of the trained model."""
    folder, commands = own
    for command in commands[1:]:
        shown = in_shell(command, folder)
    assert sorted(rows(folder / "runs/sums/run", "rollout/step")) == [0, 1]
    assert (folder / "runs/sums/model/model.safetensors").is_file()
    assert re.search(r"\d", shown), "the last block prints the model's answer"


@pytest.mark.slow
def test_a_source_archive_trains_the_same(tiny_run: Path, tmp_path: Path) -> None:
    """The folder has the files of `git archive` and no repository. The warm-up comes from the run above."""
    packed = tmp_path / "vime.tar"
    with open(packed, "wb") as file:
        subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=file, check=True)
    folder = tmp_path / "vime"
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    use_this_environment(folder)
    shutil.copytree(tiny_run, folder / "runs/tiny", ignore=shutil.ignore_patterns("grpo", "checkpoint"))
    in_shell(COMMAND, folder)
    both = [rows(path / "grpo", "train/step") for path in (tiny_run, folder / "runs/tiny")]
    plain, unpacked = ([step["train/loss"] for step in steps.values()] for steps in both)
    assert plain == pytest.approx(unpacked, rel=1e-3) and plain
    environment = json.loads((folder / "runs/tiny/grpo/environment.json").read_text())
    assert environment["git"] is None
