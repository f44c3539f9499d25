"""The reward is called once before a run starts. Its faults are errors of `vime plan` and `vime train`, and the call
changes nothing."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from config_cases import HF_CONFIG
from rollout_double import make_tokenizer, write_lines

from vime.backends import parse_config
from vime.cli import main
from vime.run import prompts as data
from vime.start import dry_reward
from vime.start.dry_reward import check_reward

CALLS: list[Any] = []
prompts = functools.partial(data.prompts, score=check_reward)
with_data = functools.partial(data.with_data, score=check_reward)
ROW = {"prompt": "1+1=", "label": "2", "metadata": {"answer": "2"}}


def length(args: Any, sample: Any, **kwargs: Any) -> float:
    """Reads the fields of a run's sample."""
    CALLS.append(sample)
    assert sample.response == sample.prompt == "1+1=" and sample.label == "2" and sample.metadata["answer"]
    assert len(sample.tokens) == 2 * sample.response_length == 2 * len(sample.rollout_log_probs) > 0
    assert sample.status is sample.Status.COMPLETED and args.rollout_batch_size == 1
    print("a reward may print")
    return sample.response_length / args.rollout_max_response_len


async def waits(args: Any, sample: Any) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"score": 1.0}


def of_group(args: Any, samples: list[Any]) -> list[float]:
    return [1.0] * len(samples)


def wrong_key(args: Any, sample: Any) -> float:
    return float(sample.metadata["anwser"])


def no_number(args: Any, sample: Any) -> Any:
    return "good"


def forgets(args: Any, sample: Any) -> Any:
    pass


def alarms(args: Any, sample: Any) -> float:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return 1.0


def refuses(args: Any, sample: Any) -> float:
    raise ValueError("an empty answer; a bad one")


def raises(args: Any, sample: Any) -> float:
    raise ZeroDivisionError("no tokens")


def asks_a_server(args: Any, sample: Any) -> float:
    try:
        with socket.create_connection(("127.0.0.1", args.hook_port)):
            return 1.0
    except Exception:  # border: a judge that counts every error as a wrong answer
        return 0.0


def writes(args: Any, sample: Any) -> float:
    Path(os.environ["REWARD_FILE"]).write_text("x")
    return 1.0


def starts(args: Any, sample: Any) -> float:
    subprocess.run(["touch", os.environ["REWARD_FILE"]], check=True)
    return 1.0


def removes(args: Any, sample: Any) -> float:
    os.remove(os.environ["REWARD_FILE"] + ".there")
    return 1.0


def reads_the_state(args: Any, sample: Any) -> float:
    from slime.rollout.state import current_state

    return float(current_state() is not None)


def needs_a_run(args: Any, sample: Any) -> float:
    return float(args.chat_parser_path)


def asks_a_judge(args: Any, sample: Any) -> float:
    return float(len(args.sglang_model_routers["judge"]))


def slow(args: Any, sample: Any) -> float:
    time.sleep(60)
    return 1.0


def own_files(args: Any, sample: Any) -> float:
    """Writes its temporary files and to /dev/null."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w", encoding="utf-8") as nowhere:
        (Path(folder) / "a").write_text("1")
        nowhere.write("x")
        return float((Path(folder) / "a").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, "vocab_size": len(tokenizer)}))
    return folder


def words(model: Path, folder: Path, *more: str, row: dict[str, Any] = ROW) -> list[str]:
    file = write_lines(folder / "d.jsonl", [row] * 2)
    text = (
        f"--hf-checkpoint {model} --prompt-data {file} --input-key prompt --label-key label --num-rollout 2"
    )
    text += " --rollout-batch-size 1 --n-samples-per-prompt 2 --rollout-max-response-len 8 --device cpu"
    text += f" --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --run-dir {folder}/run"
    return [*text.split(), *more]


def own(name: str, *more: str) -> list[str]:
    return ["--custom-rm-path", f"{__name__}.{name}", *more]


@pytest.mark.parametrize(
    "reward",
    [
        own("length"),
        own("waits", "--reward-key", "score"),
        own("of_group", "--group-rm"),
        own("own_files"),
        ["--rm-type", "math"],
        ["--rm-type", "dapo", "--reward-key", "score"],
        ["--rm-type", "random"],
        ["--rm-type", f"math,random,{__name__}.length", "--rm-weights", "1,0.5,2"],
        ["--rm-type", f"{__file__}:length"],
    ],
    ids=lambda reward: reward[1].rpartition(".")[2],
)
def test_a_reward_that_scores_leaves_no_line(
    model: Path, tmp_path: Path, capfd: Any, reward: list[str]
) -> None:
    config = parse_config(words(model, tmp_path, *reward))
    assert len(list(prompts(config))) == 1
    with_data(config)
    assert capfd.readouterr().out == "" and CALLS == [], "the call is in another process"


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([], "--rm-type must be one of .*, got None; or name a function with --custom-rm-path"),
        (
            own("wrong_key"),
            r"wrong_key must score each response, got this error .*: KeyError: 'anwser'; mend the",
        ),
        (own("no_number"), "must score each response, .*good"),
        (own("forgets"), "must score each response, .*None"),
        (own("raises"), "ZeroDivisionError: no tokens"),
        (own("waits"), "--reward-key"),
        (own("length", "--group-rm"), "must score each response"),
        (["--rm-type", f"math,{__name__}.raises"], "--rm-type math,.*ZeroDivisionError: no tokens"),
        (["--rm-type", f"math,{__name__}.of_nobody"], "--rm-type must name a function that can be called as"),
        (["--rm-type", "dapo"], "--rm-type dapo must score each response.*--reward-key"),
    ],
    ids=lambda value: value[1].rpartition(".")[2] if isinstance(value, list) and value else None,
)
def test_plan_and_train_name_what_is_wrong(
    model: Path, tmp_path: Path, reward: list[str], message: str
) -> None:
    config = parse_config(words(model, tmp_path, *reward))
    said = []
    for read in (lambda: list(prompts(config)), lambda: with_data(config)):
        with pytest.raises(ValueError, match=message) as error:
            read()
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("reward", "end"),
    [
        (
            own("wrong_key"),
            ": KeyError: 'anwser'; mend the function, the columns that it reads (--label-key, ",
        ),
        (
            own("refuses"),
            ": an empty answer; a bad one; mend the function, the columns that it reads (--label-key, ",
        ),
        (own("no_number"), " got 'good' of type str; return a float"),
        (own("forgets"), " got None of type NoneType; return a float"),
        (own("waits"), "--reward-key must name an entry of the reward, got None; sample 0 has ['score']"),
        (own("alarms"), "compute in a process of your own (math_verify: parsing_timeout=None)"),
        (["--rm-type", "dapo"], "--reward-key must name an entry of the reward, got None; sample 0 has "),
    ],
    ids=lambda value: value[1].rpartition(".")[2] if isinstance(value, list) else "",
)
def test_an_error_has_one_remedy(model: Path, tmp_path: Path, reward: list[str], end: str) -> None:
    with pytest.raises(ValueError) as error:
        list(prompts(parse_config(words(model, tmp_path, *reward))))
    begin, found, rest = str(error.value).partition(end)
    assert found, str(error.value)
    assert "mend the function" not in begin + rest and rest.count("; ") == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("writes", "it writes "),
        ("starts", "it starts a program"),
        ("removes", "it changes "),
        ("needs_a_run", "it reads args.chat_parser_path, which only a run has"),
        ("asks_a_judge", "it reads args.sglang_model_routers, which only a run has"),
        ("reads_the_state", "NoRunError: "),
        ("slow", "it needs more than 0.5 s"),
    ],
)
def test_the_call_has_no_effect_and_an_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    file = tmp_path / "file"
    monkeypatch.setenv("REWARD_FILE", str(file))
    monkeypatch.setattr(dry_reward, "LIMIT_S", 0.5 if name == "slow" else 30.0)
    (tmp_path / "file.there").touch()
    config = parse_config(words(model, tmp_path, *own(name)))
    before = sorted(tmp_path.iterdir())
    began = time.monotonic()
    note, line = prompts(config)
    assert f"{name} was not checked: {why}" in note and " = " in line
    assert sorted(tmp_path.iterdir()) == before and time.monotonic() - began < 20


def test_a_reward_over_the_network_is_not_called(model: Path, tmp_path: Path) -> None:
    """Neither a user's judge that catches every error nor remote_rm is called."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        (tmp_path / "hooks.yaml").write_text(f"hook_port: {port}\n")
        judge = own("asks_a_server", "--custom-config-path", str(tmp_path / "hooks.yaml"))
        for reward in (judge, ["--rm-type", "remote_rm", "--rm-url", f"http://127.0.0.1:{port}"]):
            lines = list(prompts(parse_config(words(model, tmp_path, *reward))))
            with pytest.raises(TimeoutError):
                server.accept()
            assert len(lines) == 1 + (reward is judge)


def test_who_else_may_score(model: Path, tmp_path: Path) -> None:
    """Rows with their own reward, and functions that make samples, may set the reward and metadata."""
    row = {**ROW, "metadata": {"rm_type": "math"}}
    config = parse_config(words(model, tmp_path, "--metadata-key", "metadata", row=row))
    assert len(list(prompts(config))) == 1
    made = ["--custom-generate-function-path", "slime.rollout.sglang_rollout.generate"]
    assert len(list(prompts(parse_config(words(model, tmp_path, *made))))) == 1
    note, _ = prompts(parse_config(words(model, tmp_path, *made, *own("wrong_key"))))
    assert "was not checked: KeyError: 'anwser'" in note


def test_a_reward_of_lists_is_called_with_a_list(model: Path, tmp_path: Path) -> None:
    """The reward of docs/agents.md takes the samples of a session as a list, so the call must not pass a single
    sample."""
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text(encoding="utf-8")
    (tmp_path / "my_agent.py").write_text(page.partition('title="my_agent.py"\n')[2].partition("```")[0])
    made = ["--custom-generate-function-path", f"{tmp_path}/my_agent.py:generate"]
    score = ["--custom-rm-path", f"{tmp_path}/my_agent.py:score"]
    (line,) = prompts(parse_config(words(model, tmp_path, *made, *score)))
    assert line.endswith("2 prompts = 2 rollouts an epoch")
    note, _ = prompts(parse_config(words(model, tmp_path, *made, *own("wrong_key"))))
    assert "KeyError: 'anwser'" in note and "(with a list of one sample: " in note


def test_the_reward_of_an_evaluation_is_called_too(model: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "held.jsonl", [ROW])
    dataset = {"name": "held", "path": file, "custom_rm_path": f"{__name__}.wrong_key", "max_response_len": 4}
    (tmp_path / "eval.yaml").write_text(json.dumps({"datasets": [dataset]}))
    more = ["--rm-type", "math", "--eval-interval", "1", "--eval-config", str(tmp_path / "eval.yaml")]
    with pytest.raises(ValueError, match="evaluation dataset held: --custom-rm-path .*wrong_key must score"):
        with_data(parse_config(words(model, tmp_path, *more)))


def test_the_command_names_it_with_the_other_problems(model: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["plan", *words(model, tmp_path, *own("wrong_key"), "--lrr", "1")]) == 2
    said = capsys.readouterr().err
    assert "2 problems:" in said and "KeyError: 'anwser'" in said and "Traceback" not in said


def of_trl(prompts: Any, completions: Any, label: Any, **kwargs: Any) -> list[float]:
    assert prompts[0] == completions[0], "the first prompt's own text is the response"
    return [float(len(kwargs["difficulty"]) == len(label))]


def test_a_reward_of_trl_gets_the_columns(model: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["plan", *words(model, tmp_path, *own("of_trl"))]) == 2
    assert "KeyError: 'difficulty'" in capsys.readouterr().err
    assert main(["plan", *words(model, tmp_path, *own("of_trl"), row=ROW | {"difficulty": None})]) == 2
    assert "--hf-checkpoint must have weights" in capsys.readouterr().err, "the reward has been called"


def of_nobody(args: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--custom-rm-path", "of_nobody", "can be called as f(args, sample), got"),
        ("--rollout-sample-filter-path", "of_nobody", "can be called as f(args, groups), got"),
        ("--rollout-sample-hook-path", "of_nobody", "can be called as f(args, sample, "),
        ("--selected-logprob-provider", "length", "can be called as f(request), got"),
    ],
)
def test_plan_and_train_refuse_a_wrong_signature(
    model: Path, tmp_path: Path, capsys: Any, flag: str, name: str, message: str
) -> None:
    reward = [] if flag == "--custom-rm-path" else ["--rm-type", "math"]
    argv = words(model, tmp_path, *reward, flag, f"{__name__}.{name}", "--lrr", "1")
    said = []
    for command in ("plan", "train"):
        assert main([command, *argv]) == 2
        said.append(capsys.readouterr().err.partition(f"vime {command}: ")[2])
    assert said[0] == said[1] and f"{flag} must name a function" in said[0] and message in said[0]
    assert "2 problems:" in said[0]
