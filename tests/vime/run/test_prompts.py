"""`vime plan` reads the prompts as `vime train` does before it starts anything: the same files are errors for both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import HF_CONFIG
from rollout_double import make_tokenizer, write_lines

from slime.rollout.eval_datasets import check_evaluation
from vime.backends import parse_config
from vime.cli import main
from vime.run import prompts as module
from vime.run.prompts import prompts, with_data

STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
USER = {"role": "user", "content": "hi"}
GOOD = {"prompt": [USER], "label": "1"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer(STRICT)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({**HF_CONFIG, "vocab_size": len(tokenizer)}))
    return tmp_path / "model"


def flags(model: Path, data: str, *more: str) -> list[str]:
    words = (
        f"--hf-checkpoint {model} --prompt-data {data} --input-key prompt --label-key label --rm-type math"
    )
    words += " --num-rollout 2 --rollout-batch-size 1 --n-samples-per-prompt 2 --rollout-max-response-len 8"
    words += " --device cpu --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
    return [*words.split(), "--run-dir", str(model.parent / "run"), *more]


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "prompt": [USER, {"role": "tool", "content": "3"}]}, "the chat template must .*no tools"),
        ({**GOOD, "prompt": [{"role": "user", "content": 5}]}, "the content of every message"),
        ({**GOOD, "prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "every part of a message's"),
        ({**GOOD, "prompt": "x \ud83d"}, "half of a surrogate pair"),
        ({**GOOD, "label": ""}, "column 'label' must hold a label"),
        ({**GOOD, "label": [1]}, "column 'label' must hold a label that the reward can use"),
    ],
)
def test_plan_and_train_refuse_the_same_rows(model, tmp_path, capsys, template, row, message):
    good, bad = write_lines(tmp_path / "g.jsonl", [GOOD]), write_lines(tmp_path / "d.jsonl", [GOOD, row])
    chat = ["--apply-chat-template"] if template else []
    evaluated = ["--eval-interval", "1", "--eval-prompt-data", "held", bad]
    for words in (flags(model, bad, *chat), flags(model, good, *chat, *evaluated)):
        config = parse_config(words)
        with pytest.raises(ValueError, match=rf"d\.jsonl:2: .*{message}"):
            with_data(config)
        with pytest.raises(ValueError, match=rf"d\.jsonl:2: .*{message}"):
            list(prompts(config))
    assert main(["plan", *flags(model, bad, *chat)]) == 2
    error = capsys.readouterr().err
    assert "d.jsonl:2: " in error and "Traceback" not in error


def test_lengths_are_those_of_train(model, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": "x" * n, "label": "1"} for n in (3, 300)])
    config = parse_config(flags(model, data))
    for read in (with_data, lambda c: list(prompts(c))):
        with pytest.raises(ValueError, match="shorter than the model's context of 256 tokens"):
            read(config)
    assert list(prompts(parse_config(flags(model, data, "--rollout-max-prompt-len", "9")))) == [
        f"{data}: 1 prompt = 1 rollouts an epoch"
    ]


def test_a_large_file_is_read_in_part_and_the_plan_says_so(model, tmp_path, monkeypatch):
    rows = [{"prompt": "x" * 99, "label": "1"}] * 99 + [{"prompt": "", "label": "1"}]
    data = write_lines(tmp_path / "d.jsonl", rows)
    monkeypatch.setattr(module, "PLANNED_BYTES", 2000)
    (line,) = prompts(parse_config(flags(model, data)))
    assert line.startswith(f"{data}: 100 prompts = 100 rollouts an epoch; only the first 1")
    assert line.endswith("were checked here (0 MiB), vime train checks all")
    with pytest.raises(ValueError, match=r"d\.jsonl:100"):
        with_data(parse_config(flags(model, data)))


def test_a_checkpoint_without_a_tokenizer_can_be_planned(model, tmp_path):
    for file in model.glob("*token*"):
        file.unlink()
    data = write_lines(tmp_path / "d.jsonl", [GOOD])
    config = parse_config(flags(model, data, "--apply-chat-template", "--rollout-max-prompt-len", "9"))
    first, second = prompts(config)
    assert first == f"{data}: 1 prompt = 1 rollouts an epoch"
    assert second == f"chat template and prompt lengths are not checked: {model} has no tokenizer here"


def test_evaluation_settings_are_checked_by_plan(model, tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", [GOOD])
    (tmp_path / "eval.yaml").write_text(f"datasets: [{{name: held, path: {data}, temperature: hot}}]")
    words = flags(model, data, "--eval-interval", "1", "--eval-config", str(tmp_path / "eval.yaml"))
    assert main(["plan", *words]) == 2
    assert "temperature of dataset 'held' must be a number, got 'hot'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="temperature of dataset 'held'"):
        parse_config(words, (check_evaluation,))


def test_no_rollout_needs_an_evaluation(model, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [GOOD])
    words = flags(model, data, "--num-rollout", "0")
    with pytest.raises(ValueError, match="--num-rollout must be 1 or more without --eval-interval, got 0"):
        parse_config(words)
    evaluated = ["--eval-interval", "3", "--eval-prompt-data", "held", data]
    assert parse_config([*words, *evaluated]).total_steps == 0
    alone = parse_config([*flags(model, data), *evaluated, "--debug-train-only"])
    assert alone.evaluation.eval_interval is None
    assert "--eval-interval 3 has no effect: without engines nothing is evaluated" in alone.notes


def test_several_data_sets(model, tmp_path, capsys):
    """A plan has a line for each set, and a wrong row in any set is an error."""
    easy = write_lines(tmp_path / "easy.jsonl", [GOOD] * 3)
    hard = write_lines(tmp_path / "hard.jsonl", [GOOD] * 5)
    words = flags(model, f"easy={easy}")
    place = words.index("--prompt-data") + 2
    words[place:place] = [f"hard={hard}", "--prompt-data-weights", "easy=1", "hard=3"]
    config = parse_config(words)
    assert config.data.prompt_data == [f"easy={easy}", f"hard={hard}"]
    assert list(prompts(config))[:3] == [
        f"easy {easy}: 3 prompts, 0.25 of each batch, again after 12 rollouts",
        f"hard {hard}: 5 prompts, 0.75 of each batch, again after 6.667 rollouts",
        "all data sets: 8 prompts = 8 rollouts an epoch",
    ]
    write_lines(tmp_path / "hard.jsonl", [GOOD, {**GOOD, "label": ""}])
    for read in (with_data, lambda c: list(prompts(c))):
        with pytest.raises(ValueError, match=r"hard\.jsonl:2: column 'label'"):
            read(config)
    assert main(["plan", *words]) == 2 and "hard.jsonl:2: " in capsys.readouterr().err


def test_one_file_stays_a_plain_value(model, tmp_path):
    """Hooks and data sources of plug-ins read it as a path."""
    data = write_lines(tmp_path / "d.jsonl", [GOOD])
    assert parse_config(flags(model, data)).namespace().prompt_data == data


def test_held_out_sets_are_read_as_training_data(model, tmp_path, capsys):
    """A plan has a line for each set and keeps --eval-interval without an engine. A row without a mask is an error."""
    make_tokenizer().save_pretrained(model)
    chat = {"prompt": [USER, {"role": "assistant", "content": "yes"}]}
    data = write_lines(tmp_path / "d.jsonl", [chat] * 3)
    held = write_lines(tmp_path / "held.jsonl", [chat])
    words = flags(model, data, "--loss-type", "sft_loss", "--debug-train-only", "--eval-temperature", "0.5")
    words += ["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"]
    words += ["--n-samples-per-prompt", "1", "--eval-interval", "2"]
    for name in ("--label-key", "--rm-type", "--rollout-max-response-len"):
        del words[words.index(name) : words.index(name) + 2]
    (tmp_path / "eval.yaml").write_text(f"datasets: {{held: {{path: {held}}}, again: {{path: {held}}}}}")
    for evaluated in (["--eval-prompt-data", "held", held], ["--eval-config", str(tmp_path / "eval.yaml")]):
        config = parse_config([*words, *evaluated], (check_evaluation,))
        assert config.evaluation.eval_interval == 2
        lines = list(prompts(config))
        assert lines[1] == "held-out set held: 1 conversation, in micro-batches as large as in training"
    assert len(lines) == 3
    note = "--eval-temperature 0.5 has no effect: the loss of held-out samples needs no generation"
    assert note in config.notes
    write_lines(tmp_path / "held.jsonl", [chat, {"prompt": [USER]}])
    for read in (with_data, lambda c: list(prompts(c))):
        with pytest.raises(ValueError, match=r"held\.jsonl:2: messages of column 'prompt' must begin"):
            read(config)


@pytest.mark.parametrize(("batch", "noted"), [("3", False), ("4", True)])
def test_a_rollout_of_more_prompts_than_the_data_has_is_noted(model, tmp_path, batch, noted):
    make_tokenizer().save_pretrained(model)
    data = write_lines(tmp_path / "d.jsonl", [GOOD] * 3)
    config = parse_config(flags(model, data, "--rollout-batch-size", batch), (check_evaluation,))
    wanted = f"--rollout-batch-size {batch} is above the 3 prompts: a rollout has some more than once"
    assert (wanted in list(prompts(config))) == noted
