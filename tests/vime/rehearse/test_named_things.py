"""Checks the labels, stop tokens, parsers and folders that a launch names, without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from slime.data.tokenizer import load_tokenizer
from vime.rehearse.changes import Flags
from vime.rehearse.folders import check_folders
from vime.rehearse.labels import check_labels
from vime.rehearse.names import NamesAsked, check_names, find_end_ids, find_stop_problems
from vime.testing.tiny_model import write_tokenizer

END, TURN = 256, 258
"""The ids of <|endoftext|> and <|im_end|>. The chat template ends an answer with the second one."""
RIGHT = {"stop": ["</answer>", "<|im_end|>"], "stop_token_ids": [END, TURN], "ends_by_template": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "model")
    write_ends(tmp_path / "model", TURN)
    return tmp_path / "model"


def write_ends(folder: Path, ends: int | list[int], file: str = "config.json") -> None:
    (folder / file).write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")


def end_tokenizer_with(folder: Path, token: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": token}), encoding="utf-8")


def problems(folder: Path, **changes: object) -> list[str]:
    """Returns the status and the text of each finding."""
    given = {**dict.fromkeys(NamesAsked.__dataclass_fields__), "template_kwargs": {}, **RIGHT, **changes}
    asked = NamesAsked(**given)  # type: ignore[arg-type]
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(str(folder))
    ends = find_end_ids(tokenizer, folder)
    return [f"{one.status}: {one.found}" for one in find_stop_problems(asked, tokenizer, ends)]


def test_right_stop_tokens_are_no_problem(model: Path) -> None:
    assert problems(model) == []


def test_a_stop_token_of_another_model_is_found(model: Path) -> None:
    assert problems(model, stop=["</answer>", "<|eot_id|>", "</s>"]) == [
        f"problem: --rollout-stop {text} is no token of the model, so no answer contains it"
        for text in ("<|eot_id|>", "</s>")
    ]


def test_an_answer_that_never_ends_is_found(model: Path) -> None:
    end_tokenizer_with(model, "<|endoftext|>")
    write_ends(model, END)
    bare: dict[str, object] = {"stop": [], "stop_token_ids": []}
    wrong = (
        "the chat template ends an answer with <|im_end|>, at which no answer stops "
        "(stop tokens: <|endoftext|>)"
    )
    assert problems(model, **bare) == [f"problem: {wrong}"]
    assert problems(model, **bare, own_generate=True) == [f"warning: {wrong}"]
    assert problems(model, **bare, ends_by_template=False) == []
    for repaired in ({"stop_token_ids": [TURN]}, {"stop": ["<|im_end|>"]}):
        assert problems(model, **{**bare, **repaired}) == []
    write_ends(
        model, [END, TURN], "generation_config.json"
    )  # the engine reads this file, and then not config.json
    assert problems(model, **bare) == []


def test_a_model_without_tokenizer_and_parsers_has_no_names_to_check(tmp_path: Path) -> None:
    assert check_names(Flags.from_argv(["--rollout-stop", "<|eot_id|>"]), None, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--vllm-tool-call-parser", "--vllm-reasoning-parser"])
def test_a_parser_that_vllm_lacks_is_found(flag: str, tmp_path: Path) -> None:
    found = check_names(Flags.from_argv([flag, "no_such"]), None, tmp_path)
    assert [one.name for one in found] == ["parser"] and "no_such" in found[0].found
    assert check_names(Flags.from_argv(["--sglang-tool-call-parser", "qwen25"]), None, tmp_path) == []


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    argv = [
        "--save",
        "file/ck",
        "--save-hf",
        "/proc/hf{rollout_id}",
        "--run-dir",
        "new/run",
        "--load",
        "/proc/a",
    ]
    found = check_folders(Flags.from_argv(argv), tmp_path)
    assert [(one.status, one.found) for one in found] == [
        (
            "problem",
            f"--save is in a folder in which this user cannot write: {tmp_path}/file/ck (Not a directory)",
        ),
        (
            "problem",
            "--save-hf is in a folder in which this user cannot write: /proc/hf (No such file or directory)",
        ),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    absent = check_folders(Flags.from_argv(["--save", "/proc/cluster/run/ck"]), tmp_path)
    assert [one.status for one in absent] == ["warning"]


def test_a_label_column_without_answers_is_found(tmp_path: Path) -> None:
    rows = [{"q": f"{n}+1=", "kind": "sum", "more": {"answer": n + 1}} for n in range(8)]
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def statuses(label: str, *more: str) -> list[tuple[str, str]]:
        flags = Flags.from_argv(["--input-key", "q", "--label-key", label, *more])
        return [
            (one.status, one.found.partition("answers: ")[2])
            for one in check_labels(flags, tmp_path / "rows")
        ]

    assert statuses("more.answer") == statuses("absent") == statuses("kind", "--loss-type", "sft_loss") == []
    assert statuses("kind") == [("problem", 'it is "sum" in each of the first 8 rows')]
    assert statuses("q") == [("problem", "it has the prompts")]
    assert statuses("q", "--custom-rm-path", "my.reward") == [("warning", "it has the prompts")]
