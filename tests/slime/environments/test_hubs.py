"""Tests the text of an environment, the flags that --environment decides, and the file of an environment's tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from config_cases import good_argv

from slime.config import Config
from slime.data.files import find_source
from slime.data.prompts import load_prompts
from slime.data.rows import RowColumns
from slime.environments import flags, hubs, rows
from slime.environments.hubs import Hub, find_environment
from slime.environments.process import close_processes
from slime.rollout.eval_datasets import check_evaluation, resolve_eval_datasets
from slime.rules import parse_args

CONNECTOR = str(Path(__file__).with_name("scripted_connector"))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub `scripted`, whose connector is in this folder."""
    monkeypatch.setitem(hubs.HUBS, "scripted", Hub(CONNECTOR, "a name"))
    monkeypatch.setattr(rows, "_files", {})
    yield
    close_processes()


def test_the_arguments_of_an_environment_are_json_or_text() -> None:
    found = find_environment(
        "verifiers:owner/my-env?n=3&x=a%20b&on=true&list=[1,2]&split=eval&tasks=5&python=/p"
    )
    assert (found.hub, found.name) == (hubs.HUBS["verifiers"], "owner/my-env")
    assert found.arguments == {"n": 3, "x": "a b", "on": True, "list": [1, 2]}
    assert (found.split, found.tasks, found.python) == ("eval", 5, "/p")
    plain = find_environment("openenv:http://127.0.0.1:8000")
    assert (plain.name, plain.arguments, plain.python) == ("http://127.0.0.1:8000", {}, sys.executable)
    assert (plain.split, plain.tasks) == (None, None)


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "gym:cart",
            "--environment must begin with a hub (verifiers, harbor, openenv, nemo-gym) and a colon, got 'gym:cart'; "
            "write HUB:NAME?argument=value, such as verifiers:my-env?tasks=100",
        ),
        (
            "harbor:",
            "--environment must have a folder of tasks after the colon, got 'harbor:'; "
            "write HUB:NAME?argument=value, such as verifiers:my-env?tasks=100",
        ),
        (
            "harbor:a?b",
            "--environment must have arguments NAME=VALUE after ?, got 'harbor:a?b'; "
            "write HUB:NAME?argument=value, such as verifiers:my-env?tasks=100",
        ),
        (
            "harbor:a?b=1&b=2",
            "--environment must have each argument once, got b twice in 'harbor:a?b=1&b=2'; leave one out",
        ),
        (
            "harbor:a?tasks=0",
            "--environment must have a whole number above 0 as tasks, got 0 in 'harbor:a?tasks=0'; correct the number",
        ),
        (
            "harbor:a?tasks=true",
            "--environment must have a whole number above 0 as tasks, got True in 'harbor:a?tasks=true'; correct the "
            "number",
        ),
    ],
)
def test_a_wrong_text_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        find_environment(text)
    assert str(error.value) == said


def test_several_environments_get_names() -> None:
    assert flags.prompt_data(["verifiers:a/b?n=1"]) == ["verifiers:a/b?n=1"]
    several = ["verifiers:a/b?n=1", "mine=harbor:tasks", "openenv:http://h:80/"]
    assert flags.prompt_data(several) == [
        "b=verifiers:a/b?n=1",
        "mine=harbor:tasks",
        "h-80=openenv:http://h:80/",
    ]


def words(tmp_path: Path, *more: str) -> list[str]:
    given = good_argv(tmp_path)
    at = given.index("--prompt-data")
    return [*given[:at], *given[at + 2 :], *more]


def test_the_tasks_of_an_environment_are_the_prompts(scripted: None, tmp_path: Path) -> None:
    text = 'scripted:one?names=["0","1","2"]&tasks=2'
    config = parse_args(words(tmp_path, "--environment", text, "--input-key", "question"))
    assert config.data.prompt_data == [text]
    assert config.rollout.custom_generate_function_path == flags.GENERATE
    assert (config.data.input_key, config.data.label_key, config.data.apply_chat_template) == (
        "prompt",
        None,
        False,
    )
    assert [note for note in config.notes if "--environment" in note] == [
        "--input-key has no effect with --environment: its prompts are in the columns prompt and metadata, and a "
        "session renders them"
    ]
    (file,) = find_source(text).files
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {
            "prompt": [{"role": "user", "content": "go"}],
            "metadata": {"environment_task": {"environment": text, "task": task, "label": None}},
        }
        for task in ("0", "1")
    ]
    (second,) = load_prompts(f"{text}@[1:]", RowColumns(input_key="prompt"))
    assert second.metadata["environment_task"]["task"] == "1"


def test_an_evaluation_set_is_an_environment_too(scripted: None, tmp_path: Path) -> None:
    test = 'scripted:two?names=["5"]&split=eval'
    more = ("--eval-interval", "1", "--eval-prompt-data", "test", test)
    config = parse_args(words(tmp_path, "--environment", 'scripted:one?names=["1"]', *more))
    (data,) = resolve_eval_datasets(config)
    (prompt,) = load_prompts(data.path, RowColumns(input_key=data.input_key))
    assert prompt.metadata["environment_task"] == {"environment": test, "task": "5", "label": "eval"}
    assert data.label_key is None and config.rollout.custom_generate_function_path == flags.GENERATE


@pytest.mark.parametrize(
    "more, said",
    [
        (
            ("--prompt-data", "p.jsonl"),
            "--prompt-data must be left out with --environment, got p.jsonl; the environment has the prompts; to mix "
            "several environments, give --environment several values",
        ),
        (
            ("--rm-type", "math"),
            "--rm-type must be left out with --environment, got math; the environment's rubric",
        ),
        (
            ("--custom-rm-path", "a.b"),
            "--custom-rm-path must be left out with --environment, got a.b; the environ",
        ),
        (
            ("--custom-generate-function-path", "a.b"),
            "--custom-generate-function-path must be left out with --environment, got a.b; the environment's loop",
        ),
        (("--environment-concurrency", "0"), "--environment-concurrency must be above 0, got 0"),
    ],
)
def test_flags_that_an_environment_decides_are_left_out(
    scripted: None, tmp_path: Path, more: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ValueError) as error:
        parse_args(words(tmp_path, "--environment", 'scripted:one?names=["0"]', *more))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "scripted:unknown",
            "must name an environment that its hub can load, got 'scripted:unknown': ModuleNotFound",
        ),
        (
            "scripted:one",
            "--environment must name an environment with tasks, got none in 'scripted:one'; correct",
        ),
        (
            "scripted:one?names=3",
            "--environment must name an environment with tasks, got 'scripted:one?names=3': Type",
        ),
        (
            'scripted:one?names=["0"]&load_s=60',
            "--environment must name an environment with tasks, got 'scripted:one?names=[\"0\"]&load_s=60': no tasks "
            "after 0.5 s; correct its arguments",
        ),
    ],
)
def test_an_environment_without_tasks_is_named(
    scripted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    if "load_s" in text:
        monkeypatch.setattr(rows, "START_S", 0.5)
    with pytest.raises(ValueError) as error:
        parse_args(words(tmp_path, "--environment", text))
    assert said in str(error.value)


def test_an_environment_in_the_file_of_evaluations(scripted: None, tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    text = 'scripted:two?names=["5"]&split=eval'
    entry = {"name": "test", "path": text}

    def parse(settings: dict[str, object], *flags: str) -> Config:
        file.write_text(yaml.safe_dump({"datasets": [{**entry, **settings}]}))
        more = ("--eval-interval", "1", "--eval-config", str(file))
        config = parse_args([*(words(tmp_path) if flags else good_argv(tmp_path)), *flags, *more])
        check_evaluation(config)
        return config

    (data,) = resolve_eval_datasets(parse({}, "--environment", 'scripted:one?names=["1"]'))
    assert (data.path, data.input_key) == (text, "prompt")
    with pytest.raises(ValueError) as error:
        parse({})
    assert str(error.value) == (
        f"--eval-config: path of dataset 'test' must name no environment in a run without --environment, got {text}; "
        "give the environment to train on with --environment"
    )
    for name, value, reason in (
        ("rm_type", "math", "rubric is the reward"),
        ("custom_generate_function_path", "test_hubs.x", "loop makes the samples"),
        ("input_key", "question", "file has the prompts"),
        ("apply_chat_template", True, "file has the prompts"),
    ):
        with pytest.raises(
            ValueError, match=f"--eval-config: {name} of dataset 'test' must be left out.*{reason}"
        ):
            parse({name: value}, "--environment", 'scripted:one?names=["1"]')
    with pytest.raises(
        ValueError, match="--eval-config: path of dataset 'test' must have .* after the colon"
    ):
        parse({"path": "scripted:"}, "--environment", 'scripted:one?names=["1"]')


@pytest.mark.parametrize("flag, more", [("--prompt-data", ()), ("--eval-prompt-data", ("test",))])
def test_an_environment_is_no_prompt_file(tmp_path: Path, flag: str, more: tuple[str, ...]) -> None:
    """Without --environment, no function would run its episodes."""
    with pytest.raises(ValueError) as error:
        parse_args([*good_argv(tmp_path), flag, *more, "harbor:tasks"])
    assert str(error.value) == (
        f"{flag} must name no environment in a run without --environment, got harbor:tasks; give the environment to "
        "train on with --environment"
    )
