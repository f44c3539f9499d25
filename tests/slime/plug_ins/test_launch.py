"""Tests the functions that Python launch scripts of slime call."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.plug_ins import launch
from slime.system.import_path import ROOT
from slime.utils.external_utils import command_utils as U
from slime.utils.misc import exec_command


def started(monkeypatch, **more):
    """Returns the commands and environments that `execute_train` starts, without starting them."""
    found = []
    real = subprocess.run

    def run(words, **options):
        if words[0] == sys.executable:
            found.append((words, options.get("env", {})))
            return SimpleNamespace(stdout="", returncode=0)
        return real(words, **options)

    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    U.execute_train(**more)
    return found


def test_a_script_starts_the_training_command(monkeypatch, capsys):
    called = []
    monkeypatch.setenv("MY_KEY", "secret")
    ((words, env),) = started(
        monkeypatch,
        train_args="--wandb-key ${MY_KEY} --hf-checkpoint '/models/a b' --num-rollout 3 ",
        num_gpus_per_node=8,
        megatron_model_type="qwen3-4B",
        before_ray_job_submit=lambda: called.append(1),
        extra_env_vars={"A": "1"},
        config=U.ExecuteTrainConfig(extra_env_vars="B=2 C='x y'", cuda_core_dump=True),
    )
    assert words[:4] == [sys.executable, "-m", "vime", "train"] and called == [1]
    assert words[words.index("--wandb-key") + 1] == "secret" and "secret" not in capsys.readouterr().out
    assert words[words.index("--num-layers") + 1] == "36"
    assert words[-4:] == ["--hf-checkpoint", "/models/a b", "--num-rollout", "3"]
    assert (env["A"], env["B"], env["C"]) == ("1", "2", "x y") and env[
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION"
    ] == "1"


def test_the_asynchronous_script_and_a_model_without_a_file(monkeypatch, capsys):
    more = {"train_args": "--a 1", "num_gpus_per_node": 0, "megatron_model_type": "mine"}
    ((words, _),) = started(monkeypatch, **more, train_script="train_async.py")
    assert words[4:] == ["--a", "1", "--max-staleness", "1"]
    assert "scripts/models has no mine.sh" in capsys.readouterr().out
    monkeypatch.setenv("VIME_SCRIPT_ENABLE_RAY_SUBMIT", "0")
    assert started(monkeypatch, **more) == [] and "-m vime train --a 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"train_script must be train.py or train_async.py, got 'sft.py'"):
        started(monkeypatch, **more, train_script="sft.py")


def test_the_command_is_one_that_vime_has():
    """`vime plan` parses the arguments of a script as `vime train` does."""
    words = [*launch.train_command("train.py")[:3], "train", "--no-such-flag"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--no-such-flag" in done.stderr


def test_a_checkpoint_needs_no_conversion(tmp_path, capsys):
    model = tmp_path / "models/tiny"
    model.mkdir(parents=True)
    more = {"megatron_model_type": None, "num_gpus_per_node": 8, "hf_checkpoint": str(model)}
    with pytest.raises(FileNotFoundError, match="hf_checkpoint must be a checkpoint"):
        U.convert_checkpoint("tiny", dir_dst=str(tmp_path / "out"), **more)
    (model / "config.json").write_text("{}")
    for _ in range(2):
        U.convert_checkpoint("tiny", dir_dst=str(tmp_path / "out"), **more)
    assert (tmp_path / "out/tiny_torch_dist/config.json").read_text() == "{}"
    assert "exists and is kept" in capsys.readouterr().out


@dataclasses.dataclass
class Settings(U.ExecuteTrainConfig):
    model: str = "tiny"
    steps: int = 3
    fast: bool = False


def test_a_dataclass_becomes_a_command_line(monkeypatch):
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    app, found = typer.Typer(), []

    @app.command()
    @U.dataclass_cli
    def main(settings: Settings):
        """Trains."""
        found.append(settings)

    env = {"SLIME_SCRIPT_MODEL": "large", "VIME_SCRIPT_NUM_NODES": "2"}
    result = CliRunner().invoke(app, ["--steps", "5", "--fast"], env=env)
    assert result.exit_code == 0, result.output
    assert found == [Settings(num_nodes=2, model="large", steps=5, fast=True)]
    with pytest.raises(ValueError, match="must have a dataclass as its type"):
        U.dataclass_cli(lambda settings: None)


def test_small_helpers(monkeypatch, tmp_path, capsys):
    assert exec_command("echo $((1 + 2))", capture_output=True) == "3\n"
    with pytest.raises(subprocess.CalledProcessError):
        exec_command("exit 3")
    assert re.fullmatch(r"\d{6}-\d{6}-\d{3}", U.create_run_id())
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert U.get_default_wandb_args("run_x.py") == ""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    args = U.get_default_wandb_args("tests/run_x.py", "p", "id")
    assert args == "--use-wandb --wandb-project slime-run_x --wandb-group p_id " and "secret" not in args
    monkeypatch.setenv("SLIME_TEST_ENABLE_INFINITE_RUN", "True")
    assert U.get_env_enable_infinite_run()
    monkeypatch.setenv("SLIME_TEST_ENABLE_INFINITE_RUN", "often")
    with pytest.raises(
        ValueError, match="SLIME_TEST_ENABLE_INFINITE_RUN must be 1, true, 0 or false, got 'often'"
    ):
        U.get_env_enable_infinite_run()
    file = Path(U.save_to_temp_file(json.dumps({"a": 1}), "json"))
    assert file.suffix == ".json" and json.loads(file.read_text()) == {"a": 1}
    file.unlink()
    with pytest.raises(ValueError, match="extra_env_vars must be NAME=VALUE pairs or JSON, got 'A'"):
        launch._variables("A B=1")
    assert launch._variables('{"A": 1}') == {"A": "1"} and launch._variables(" ") == {}
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_text("1")
    if exec_command("command -v rsync || true", capture_output=True):
        U.rsync_simple(str(tmp_path / "a"), str(tmp_path / "b"))
        assert (tmp_path / "b/x").read_text() == "1"
