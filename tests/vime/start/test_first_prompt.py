"""`vime plan` shows the first prompt as the model reads it, its label with its type, and the reward of the dry call.
The JSON text of chat messages in a CSV cell is read as messages."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from config_cases import HF_CONFIG
from rollout_double import make_tokenizer, write_lines

from vime.backends import parse_config
from vime.cli import main
from vime.run.prompts import prompts, with_data
from vime.start.first_prompt import FirstPrompt

SYSTEM = {"role": "system", "content": "Add."}
ASKED = {"role": "user", "content": "1+1="}
RENDERED = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE = "--apply-chat-template"


def score(args: Any, sample: Any) -> float:
    return 0.25


def record(args: Any, sample: Any) -> dict[str, float]:
    return {"acc": 1.0, "score": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, "vocab_size": len(tokenizer)}))
    return folder


def table(path: Path, *cells: tuple[str, str]) -> str:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("prompt", "label"), *cells])
    return str(path)


def flags(model: Path, data: str, *more: str, reward: str = "score") -> list[str]:
    words = (
        f"--hf-checkpoint {model} --prompt-data {data} --input-key prompt --label-key label --num-rollout 2"
    )
    words += " --rollout-batch-size 1 --n-samples-per-prompt 2 --rollout-max-response-len 8 --device cpu"
    words += f" --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --custom-rm-path {__name__}.{reward}"
    return [*words.split(), "--run-dir", str(Path(data).parent / "run"), *more]


def lines(argv: list[str]) -> list[str]:
    first, config = FirstPrompt(), parse_config(argv)
    return [*prompts(config, first.score), *first.lines()]


def test_messages_of_a_cell_are_messages(model: Path, tmp_path: Path) -> None:
    """Messages in a cell must not silently become the text of a user turn."""
    for text in (json.dumps([SYSTEM, ASKED]), json.dumps([SYSTEM, ASKED], indent=1)):
        data = table(tmp_path / "d.csv", (text, "2"))
        assert lines(flags(model, data, TEMPLATE)) == [
            f"{data}: column 'prompt' holds chat messages as JSON text, which are read as messages",
            f"{data}: 1 prompt = 1 rollouts an epoch",
            f"first prompt, as the model reads it: {json.dumps(RENDERED)}",
            'its label: "2" (text)',
            "its reward, with its own text as the response: 0.25",
        ]


@pytest.mark.parametrize(
    "text",
    [
        "1+1=",
        "[1, 2] has which sum?",
        '["a", "b"]',
        '[{"name": "x"}]',
        "[{'name': 1}]",
        "[]",
        '{"role": "user"}',
    ],
)
def test_other_cells_stay_one_user_turn(model: Path, tmp_path: Path, text: str) -> None:
    data = table(tmp_path / "d.csv", (text, "2"))
    shown = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert (
        lines(flags(model, data, TEMPLATE))[1] == f"first prompt, as the model reads it: {json.dumps(shown)}"
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (str([SYSTEM, ASKED]), "the text of a Python list"),
        (f"[{SYSTEM}\n {ASKED}]", "text that is no JSON"),
        (json.dumps([SYSTEM, ASKED])[:-9], "text that is no JSON"),
    ],
)
def test_a_list_that_is_no_json_is_an_error(model: Path, tmp_path: Path, text: str, kind: str) -> None:
    data = table(tmp_path / "d.csv", (json.dumps([ASKED]), "2"), (text, "2"))
    for read in (with_data, lambda c: list(prompts(c))):
        with pytest.raises(ValueError, match=rf"d\.csv:\d: column 'prompt' must .*, got {kind}") as error:
            read(parse_config(flags(model, data, TEMPLATE)))
        assert "; write the cell with json.dumps(messages), or the file as JSON Lines" in str(error.value)
    assert with_data(parse_config(flags(model, data))), "without the template, a prompt is its text"


def test_formats_with_lists(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In these formats JSON text stays text, with a warning. A Python list is an error."""
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": json.dumps([ASKED]), "label": 2}])
    with caplog.at_level(logging.WARNING):
        shown = lines(flags(model, data, TEMPLATE))
    assert shown[-2:] == ["its label: 2 (number)", "its reward, with its own text as the response: 0.25"]
    assert "user\\n[{" in shown[1]
    assert "d.jsonl:1: column 'prompt' has the JSON text of a list of messages" in caplog.text
    data = write_lines(tmp_path / "e.jsonl", [{"prompt": str([ASKED]), "label": 2}])
    with pytest.raises(ValueError, match="e.jsonl:1: column 'prompt' must hold .*the text of a Python list"):
        lines(flags(model, data, TEMPLATE))


def test_a_pair_of_a_csv(model: Path, tmp_path: Path) -> None:
    good, bad = ([ASKED, {"role": "assistant", "content": text}] for text in ("2", "3"))
    with open(tmp_path / "p.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("chosen", "rejected"), (json.dumps(good), json.dumps(bad))])
    from slime.data.prompts import load_prompts
    from slime.data.rows import RowColumns

    columns = RowColumns(input_key="prompt", chosen_key="chosen", rejected_key="rejected")
    (prompt,) = load_prompts(str(tmp_path / "p.csv"), columns)
    assert [turn["content"] for turn in prompt.text] == ["1+1=", "2"]


def test_long_texts_and_labels_of_each_type(model: Path, tmp_path: Path) -> None:
    for label, shown in (
        ("2", '"2" (text)'),
        (2.5, "2.5 (number)"),
        (["a"], '["a"] (list)'),
        ({"a": 1}, '{"a": 1} (object)'),
    ):
        data = write_lines(tmp_path / "d.jsonl", [{"prompt": "x" * 120, "label": label}])
        assert f"its label: {shown}" in lines(flags(model, data))
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": "a" * 99 + "b" * 51 + "c" * 99, "label": "2"}])
    _, text, *_ = lines(flags(model, data))
    assert text == f'first prompt, as the model reads it: "{"a" * 99} ... {"c" * 99}"'
    words = [word for word in flags(model, data) if word not in ("--label-key", "label")]
    assert "its label: none (--label-key names the column)" in lines(words)


def test_the_command_shows_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = table(tmp_path / "d.csv", ("1+1=", "2"))
    argv = flags(model, data, "--reward-key", "score", "--gpu", "h100", reward="record")
    assert main(["plan", *("cuda" if word == "cpu" else word for word in argv)]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "  its reward, with its own text as the response: {'acc': 1.0, 'score': 0.5}" in said.out, said.err


@pytest.mark.parametrize(
    "generate", [[], ["--custom-generate-function-path", "slime.rollout.sglang_rollout.generate"]]
)
def test_a_record_without_a_key_is_an_error_also_with_a_generate_function(
    model: Path, tmp_path: Path, generate: list[str]
) -> None:
    """A note is not enough, because the run would end after its engines have started."""
    data = table(tmp_path / "d.csv", ("1+1=", "2"))
    argv = flags(model, data, *generate, reward="record")
    for read in (lambda: lines(argv), lambda: with_data(parse_config(argv), FirstPrompt().score)):
        with pytest.raises(ValueError, match=r"has \['acc', 'score'\]: give --reward-key score$"):
            read()
