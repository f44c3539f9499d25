"""`vime import` of scripts of TRL: settings, rewards and data, read and not run."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.hooks import load_function
from vime.cli import main
from vime.importing.slices import join_statements, needed, statements

HEAD = "from trl import GRPOConfig, GRPOTrainer\n"
REWARD = "def score(completions, **kwargs):\n    return [1.0] * len(completions)\n"


def imported(folder: Path, script: str, *words: str) -> dict[str, Any]:
    """Returns the flags of an imported script."""
    (folder / "script.py").write_text(script)
    out = folder / "out.yaml"
    assert main(["import", "trl", str(folder / "script.py"), *words, "--output", str(out)]) == 0
    found = yaml.safe_load(out.read_text())
    assert isinstance(found, dict)
    return found


def script(config: str, trainer: str = "", before: str = "") -> str:
    call = (
        f"GRPOTrainer(model='M', reward_funcs=score, args=GRPOConfig({config}), train_dataset=rows{trainer})"
    )
    return f"{HEAD}{REWARD}{before or 'rows = make()'}\n{call}.train()\n"


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ("learning_rate=2e-6, lr_scheduler_type='cosine'", {"lr": 2e-06, "lr-decay-style": "cosine"}),
        ("", {"lr": None, "lr-decay-style": "linear", "weight-decay": 0.0, "calculate-per-token-loss": True}),
        ("loss_type='grpo'", {"calculate-per-token-loss": None}),
        ("loss_type='cispo'", {"advantage-estimator": "cispo"}),
        ("beta=0.04", {"use-kl-loss": True, "kl-loss-coef": 0.04, "kl-loss-type": "k3"}),
        ("beta=0.0", {"use-kl-loss": None}),
        ("scale_rewards=False, mask_truncated_completions=True",
         {"disable-grpo-std-normalization": True, "use-overlong-filtering": True}),
        ("max_steps=10, num_iterations=1", {"num-rollout": 10, "num-epoch": None}),
        ("num_train_epochs=2", {"num-epoch": 2, "num-rollout": None}),
        ("per_device_train_batch_size=4, gradient_accumulation_steps=8, num_generations=16",
         {"rollout-batch-size": 2, "n-samples-per-prompt": 16, "global-batch-size": 32}),
        ("per_device_train_batch_size=8, steps_per_generation=4, max_steps=10",
         {"rollout-batch-size": 4, "global-batch-size": 8, "num-rollout": 3}),
        ("bf16=True, seed=7, adam_beta2=0.99", {"bf16": True, "seed": 7, "adam-beta2": 0.99}),
        ("**{'temperature': 0.7}", {"rollout-temperature": 0.7}),
        ("max_completion_length=2**9, epsilon=0.1 * 2", {"rollout-max-response-len": 512}),
        ("save_strategy='no', output_dir='x'", {"save": None}),
        ("output_dir=f'{NAME}-grpo', save_steps=20", {"save": "qwen-grpo", "save-interval": 20}),
    ],
)  # fmt: skip
def test_settings(tmp_path: Path, config: str, flags: dict[str, Any]) -> None:
    found = imported(tmp_path, script(config, before="NAME = 'qwen'\nrows = make()"))
    assert {name: found.get(name) for name in flags} == flags


def test_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("temperature: 0.5\nlearning_rate: 1\n")
    words = ["--learning_rate", "3.0e-6", "--num_processes=4", "--config", str(tmp_path / "more.yaml")]
    found = imported(tmp_path, script("learning_rate=1e-6, temperature=0.9"), *words)
    assert (found["lr"], found["rollout-temperature"], found["actor-num-gpus-per-node"]) == (3e-06, 0.5, 4)
    assert found["rollout-batch-size"] == 4 and found["global-batch-size"] == 32


def test_each_setting_without_a_counterpart_is_one_line(tmp_path: Path, capsys: Any) -> None:
    config = "min_p=0.1, num_iterations=4, loss_type='luspo', wandb_entity=f(), new_in_trl=3"
    imported(tmp_path, script(config))
    said = capsys.readouterr().out
    for line in (
        "TRL: min_p=0.1 (script.py, line 5): no flag: the trainer computes log-probs for temperature, top-p and top-k",
        "TRL: num_iterations=4: no flag: each sample is trained on once",
        "TRL: loss_type=luspo (script.py, line 5): no flag: this loss is not there",
        "TRL: wandb_entity=f(): an expression, whose value only a run of the script has; write the flag yourself",
        "TRL: new_in_trl=3 (script.py, line 5): no table of vime has this setting of TRL; `vime flags new_in_trl`",
    ):
        assert sum(one.startswith(line) for one in said.splitlines()) == 1, (line, said)
    comments = (tmp_path / "out.yaml").read_text()
    assert "# min_p=0.1" in comments and "# new_in_trl=3" in comments


def test_each_argument_of_the_trainer_without_a_counterpart_is_one_line(tmp_path: Path, capsys: Any) -> None:
    more = ", callbacks=[Mine()], tools=[search], processing_class=None, in_trl_2=3, **rest"
    imported(tmp_path, script("", f"{more}, peft_config=get_peft_config(x)"))
    said = capsys.readouterr().out.splitlines()
    for line in (
        "TRL: callbacks=[Mine()] of the trainer (script.py): no flag: vime.train takes callbacks",
        "TRL: tools=[search] of the trainer (script.py): no flag: an agent calls tools over a session",
        "TRL: in_trl_2=3 of the trainer (script.py): no table of vime has this argument of TRL's trainer",
        "TRL: **=rest of the trainer (script.py): its names are known to a run of the script only",
        "TRL: peft_config=get_peft_config(x): an expression, whose value only a run of the script has; write --lora",
    ):
        assert sum(one.startswith(line) for one in said) == 1, (line, said)
    assert not [one for one in said if "processing_class" in one or "reward_funcs" in one]


def test_every_setting_has_a_comment(tmp_path: Path) -> None:
    imported(tmp_path, script("learning_rate=1e-5, logging_steps=1, top_p=0.9, use_vllm=True"))
    text = (tmp_path / "out.yaml").read_text()
    for name in ("learning_rate=1e-05", "logging_steps=1", "top_p=0.9", "use_vllm=true"):
        assert f"# {name} (script.py, line 5): " in text
    assert "(default of vime: --lr 1e-06)" in text and "seed=42 (default of TRL)" in text


IN_MAIN = """
import os
import re
from trl import GRPOConfig, GRPOTrainer, ModelConfig
from datasets import Dataset
from peft import LoraConfig

LIMIT = 3
PATTERN = re.compile("x" * LIMIT)

class Grader:
    def grade(self, text):
        return float(bool(PATTERN.search(text)))

def score(completions, **kwargs):
    rows = [Grader().grade(c) for c in completions]
    return rows

os.environ["WRONG"] = "1"

def main():
    rows = [{"prompt": "a", "answer": "b"}]
    rows.append({"prompt": "c", "answer": "d"})
    data = Dataset.from_list(rows)
    unused = launch_missiles()
    def second(prompts, completions, answer, **kwargs):
        return [float(LIMIT)] * len(prompts)
    peft = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", lora_dropout=0.1)
    trainer = GRPOTrainer("M", [score, second, lambda completions, **kw: [0.0]], GRPOConfig(), data, peft_config=peft)
    trainer.train()

if __name__ == "__main__":
    main()
"""


def test_rewards_and_data_come_with_what_they_need_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other statements of the script, such as its imports of TRL and its training, are left out."""
    found = imported(tmp_path, IN_MAIN)
    assert found["rm-type"] == [
        f"{tmp_path}/out_rewards.py:{name}" for name in ("score", "second", "reward_3")
    ]
    assert found["lora-rank"] == 8 and found["lora-alpha"] == 32 and "lora-target-modules" not in found
    rewards = (tmp_path / "out_rewards.py").read_text()
    assert not any(word in rewards for word in ("trl", "missiles", "datasets", "WRONG"))
    monkeypatch.chdir(tmp_path)
    assert load_function(found["rm-type"][0])(completions=["xxx", "x"]) == [1.0, 0.0]
    assert load_function(found["rm-type"][1])(prompts=["a"], completions=["x"], answer=["b"]) == [3.0]
    data = (tmp_path / "out_data.py").read_text()
    assert "rows.append" in data and f"data.to_json('{tmp_path}/out_train.jsonl')" in data
    assert not any(word in data for word in ("missiles", "PATTERN", "trl"))
    assert found["apply-chat-template"] is False and found["prompt-data"] == f"{tmp_path}/out_train.jsonl"


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ("load_dataset('openai/gsm8k', 'main', split='train')", "openai/gsm8k:main:train"),
        ("load_dataset('trl-lib/tldr', split='train')", "trl-lib/tldr:train"),
        ("load_dataset('json', data_files='a.jsonl', split='train')", "a.jsonl"),
    ],
)
def test_a_plain_data_set_needs_no_file(tmp_path: Path, data: str, value: str) -> None:
    assert imported(tmp_path, script("", before=f"rows = {data}"))["prompt-data"] == value
    assert not (tmp_path / "out_data.py").exists()


def test_a_data_set_of_the_command_line(tmp_path: Path) -> None:
    before = "rows = load_dataset(script_args.dataset_name)['train']"
    words = ["--dataset_name", "a/b", "--dataset_train_split", "train"]
    assert imported(tmp_path, script("", before=before), *words)["prompt-data"] == "a/b:train"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (
            "x = 1\n",
            [],
            "must call GRPOTrainer or RLOOTrainer, got no such call; give the script that trains",
        ),
        ("def (:\n", [], "must be a Python script, got invalid syntax"),
        (
            script("per_device_train_batch_size=3"),
            [],
            "be a multiple of num_generations 8, got 3; correct the script",
        ),
        (
            script("gradient_accumulation_steps=1.5"),
            [],
            "gradient_accumulation_steps of TRL must be a whole number",
        ),
        (script(""), ["--output", "out.json"], "--output must name a YAML file, got out.json"),
        (script(""), ["--config", "no.yaml"], "--config of TRL must name a file that exists, got no.yaml"),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    tmp_path: Path, text: str, words: list[str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(text)
    assert main(["import", "script.py", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_no_file_is_replaced(tmp_path: Path, capsys: Any) -> None:
    imported(tmp_path, script(""))
    assert main(["import", str(tmp_path / "script.py"), "--output", str(tmp_path / "out.yaml")]) == 2
    assert "--output must name new files, got " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "names", "text"),
    [
        ("import a.b, c\nx = a.b.d\ny = c", {"x"}, "import a.b\nx = a.b.d\n"),
        ("from m import (p as q, r)\nx = q", {"x"}, "from m import p as q\nx = q\n"),
        ("x = {}\nx['a'] = 1\ny = 2\ny += 1", {"x"}, "x = {}\nx['a'] = 1\n"),
        ("for i in range(3):\n    x = i\ny = 1", {"x"}, "for i in range(3):\n    x = i\n"),
        ("x = [i for i in base]\nbase = 1\ni = 5", {"x"}, "x = [i for i in base]\nbase = 1\n"),
        ("with open('f') as f:\n    x = f.read()", {"x"}, "with open('f') as f:\n    x = f.read()\n"),
    ],
)
def test_slices(source: str, names: set[str], text: str) -> None:
    chosen, missing = needed(statements(source, ast.parse(source), []), names)
    assert join_statements(chosen, names) == text and not missing


def test_a_missing_name_is_named(tmp_path: Path, capsys: Any) -> None:
    assert "argparse" in sys.stdlib_module_names
    imported(tmp_path, script("", before="rows = load(options.data)"))
    assert (
        "out_data.py reads load, options, which the script gets elsewhere: write them"
        in capsys.readouterr().out
    )
