"""`vime import` of configurations of verl: YAML, launch scripts and overrides, with verl's own names, old and new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from slime.config.foreign_rewards import RewardColumns, adapted
from slime.hooks import load_function
from slime.types import Sample
from vime.cli import main
from vime.importing import verl

FILE = """\
defaults: [ppo_trainer]
data:
  train_files: [a.parquet, b.parquet]
  train_batch_size: 64
  max_response_length: 1024
actor_rollout_ref:
  model:
    path: M
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    ppo_mini_batch_size: 16
    optim: {lr: 2.0e-6, lr_warmup_steps: -1}
    clip_ratio_high: 0.28
  rollout:
    n: 8
    prompt_length: ${data.max_prompt_length}
    response_length: ${data.max_response_length}
    gpu_memory_utilization: 0.6
algorithm:
  adv_estimator: grpo
trainer:
  total_epochs: 4
  default_local_dir: ckpt/${trainer.experiment_name}
  experiment_name: mine
"""


def imported(folder: Path, text: str, *words: str, name: str = "run.yaml") -> dict[str, Any]:
    (folder / name).write_text(text)
    out = folder / "out.yaml"
    out.unlink(missing_ok=True)
    assert main(["import", str(folder / name), *words, "--output", str(out)]) == 0
    found = yaml.safe_load(out.read_text())
    assert isinstance(found, dict)
    return found


def test_a_file_and_its_references(tmp_path: Path, capsys: Any) -> None:
    found = imported(tmp_path, FILE, "data.train_batch_size=32", "+actor_rollout_ref.rollout.top_p=0.9")
    expected = {
        **{
            "prompt-data": ["a.parquet", "b.parquet"],
            "rollout-batch-size": 32,
            "rollout-max-response-len": 1024,
        },
        **{"hf-checkpoint": "M", "global-batch-size": 128, "lr": 2e-06, "eps-clip-high": 0.28},
        **{"n-samples-per-prompt": 8, "vllm-gpu-memory-utilization": 0.6, "num-epoch": 4, "colocate": True},
        **{"save": "ckpt/mine", "rollout-top-p": 0.9, "input-key": "prompt", "apply-chat-template": True},
        "label-key": "reward_model.ground_truth",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["eps-clip-c"] == 3.0 and found["calculate-per-token-loss"] is True, "defaults of verl"
    assert found["rollout-num-gpus-per-engine"] == 2 and "lr-decay-style" not in found, (
        "both have the same default"
    )
    text = (tmp_path / "out.yaml").read_text()
    assert "# actor_rollout_ref.actor.clip_ratio_high=0.28 (run.yaml, line 13): same meaning" in text
    assert "data.train_batch_size=32 (command line)" in text
    said = capsys.readouterr().out
    assert "prompt_length=${data.max_prompt_length} (run.yaml, line 16): a reference" in said
    assert "_target_" not in text and "defaults" not in said
    assert "first: give --rm-type or --custom-rm-path: verl chooses the reward" in said


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["algorithm.adv_estimator=gae"], {"advantage-estimator": "ppo"}),
        (["algorithm.adv_estimator=rloo"], {"advantage-estimator": "rloo"}),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"], {"calculate-per-token-loss": None}),
        (["actor_rollout_ref.actor.use_kl_loss=True"], {"kl-loss-coef": 0.001, "kl-loss-type": "low_var_kl"}),
        (["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1"],
         {"use-kl-loss": True, "kl-loss-coef": 0.1}),
        (["actor_rollout_ref.actor.use_kl_loss=False"], {"use-kl-loss": None, "kl-loss-type": None}),
        (["algorithm.use_kl_in_reward=True"], {"kl-coef": 0.001}),
        (["trainer.total_training_steps=7"], {"num-rollout": 7, "num-epoch": None}),
        (["trainer.save_freq=-1", "trainer.test_freq=5"], {"save-interval": None, "eval-interval": 5}),
        (["data.prompt_key=question"], {"input-key": "question"}),
        (["reward.custom_reward_function.path=r.py"], {"custom-rm-path": "r.py:compute_score"}),
        (["custom_reward_function.path=r.py", "custom_reward_function.name=f"], {"custom-rm-path": "r.py:f"}),
        (["reward_model.reward_kwargs.overlong_buffer_cfg.len=512"], {"overlong-buffer-len": 512}),
        (["data.train_files=[x.parquet]"], {"prompt-data": "x.parquet"}),
    ],
)  # fmt: skip
def test_overrides(tmp_path: Path, words: list[str], flags: dict[str, Any]) -> None:
    found = imported(tmp_path, FILE, *words)
    assert {name: found.get(name) for name in flags} == flags


def test_a_launch_script(tmp_path: Path) -> None:
    text = """
set -x
export MODEL=Qwen/Qwen3-4B   # ours
files="['a.parquet']"
SIZE=${BATCH:-128}
python3 -m verl.trainer.main_ppo --config-path=config \\
    data.train_files="$files" \\
    data.train_batch_size=$SIZE actor_rollout_ref.model.path=${MODEL} \\
    actor_rollout_ref.rollout.n=5 "$@"
echo done
"""
    found = imported(tmp_path, text.replace("   # ours", ""), "data.train_batch_size=256", name="run.sh")
    expected = {"prompt-data": "a.parquet", "rollout-batch-size": 256, "hf-checkpoint": "Qwen/Qwen3-4B"}
    assert {name: found.get(name) for name in expected} == expected and found["global-batch-size"] == 256 * 5


def test_the_reward_of_a_data_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source, reward in (("openai/gsm8k", "gsm8k"), ("math_dapo", "dapo"), ("mine", None)):
        pq.write_table(pa.table({"data_source": [source]}), "a.parquet")
        assert imported(tmp_path, FILE).get("rm-type") == reward


def test_reward_kwargs_reach_the_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(solution_str, ground_truth, bonus=0.0, **kwargs):\n"
        "    return bonus + float(ground_truth in solution_str)\n"
    )
    words = [f"custom_reward_function.path={tmp_path}/mine.py", "custom_reward_function.name=f"]
    found = imported(tmp_path, FILE, *words, "custom_reward_function.reward_kwargs.bonus=0.25")
    assert found["custom-rm-path"] == f"{tmp_path}/out_rewards.py:f"
    reward = adapted(load_function(found["custom-rm-path"]), RewardColumns(label_key="x"))
    assert reward(None, Sample(response="4 2", label="2")) == 1.25


def test_defaults_are_those_of_the_tables() -> None:
    from vime.importing.settings import PEERS

    known = verl._OWN | PEERS.keys()
    assert verl.DEFAULTS.keys() <= known


@pytest.mark.parametrize(
    ("name", "text", "words", "message"),
    [
        (
            "a.yaml",
            "model: x\n",
            [],
            "must be a script of TRL, or a YAML file or a launch script of verl, got a file with",
        ),
        ("a.yaml", "a: [\n", [], "must be valid YAML, got "),
        ("a.yaml", "- 1\n", [], "got a file with no mapping"),
        ("a.sh", "echo\n", [], "must call verl.trainer.main_ppo, got no such call"),
        ("a.yaml", FILE, ["lr"], "an override must be spelled name=value, got 'lr'; spell it as Hydra does"),
        ("a.yaml", FILE, ["actor_rollout_ref.rollout.n=x"], "must be whole numbers, got 16 and x"),
        ("a.yaml", FILE, ["--output"], "--output must be followed by a file, got none"),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    tmp_path: Path,
    name: str,
    text: str,
    words: list[str],
    message: str,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert main(["import", name, *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_the_command_needs_a_file(capsys: Any) -> None:
    for words, message in (
        (["verl"], "FILE must name a script or a configuration, got none; see vime import --help"),
        (["no.py"], "FILE must name a file that exists, got no.py; check the path"),
    ):
        assert main(["import", *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["import", "--help"]) == 0
