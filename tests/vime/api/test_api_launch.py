"""`vime.train` builds the words of the command line, and its errors are those of the command line."""

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from config_cases import good_argv

import vime
from slime.config.config_file import split_argv, with_config_files
from vime.api import launch, live
from vime.backends import parse_config
from vime.commands.config import all_flags


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Returns a function that calls `vime.train` and returns the flags that the run would get."""
    monkeypatch.chdir(tmp_path)

    def call(*args, **kwargs):
        made = SimpleNamespace()

        class Recorded:
            def __init__(self, argv, run_dir, callbacks):
                made.groups = {g.name: g.values for g in with_config_files(split_argv(argv))}

            def follow(self):
                return self

        monkeypatch.setattr(launch, "LiveRun", Recorded)
        vime.train(*args, **kwargs)
        return made.groups

    return call


def reward(args, sample):
    return 1.0


def test_a_dict_has_the_flags_in_any_spelling(words) -> None:
    found = words(
        {"rollout-batch-size": 4, "colocate": True, "--load": None, "train_env_vars": {"A": "1"}},
        prompt_data=Path("a.jsonl"),
        eval_prompt_data=("a", Path("b")),
        balance_data=False,
        run_dir="runs/x",
    )
    assert found == {
        **{
            "rollout_batch_size": ["4"],
            "colocate": [],
            "train_env_vars": ['{"A": "1"}'],
            "run_dir": ["runs/x"],
        },
        **{"prompt_data": ["a.jsonl"], "eval_prompt_data": ["a", "b"], "no_balance_data": []},
    }


def test_files_come_first_and_flags_win(words, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("lr: 1\nhf-checkpoint: M/base\nseed: 3\n")
    (tmp_path / "b.yaml").write_text("lr: 2\n")
    found = words(["a.yaml", Path("b.yaml")], seed=4)
    assert found["lr"] == ["2"] and found["seed"] == ["4"]
    assert found["run_dir"][0].startswith("runs/base-")
    (tmp_path / "b.yaml").write_text("run-dir: runs/mine\n")
    assert words(["a.yaml", "b.yaml"])["run_dir"] == ["runs/mine"]


def test_functions_become_paths_of_files(words) -> None:
    found = words(
        {"rollout_sample_hook_path": reward}, reward=reward, generate=reward, filter="a.b", run_dir="r"
    )
    own = [f"{Path('r/python/functions.py').resolve()}:{name}" for name in ("reward", "reward_1", "reward_2")]
    assert [
        found["rollout_sample_hook_path"],
        found["custom_rm_path"],
        found["custom_generate_function_path"],
    ] == [[path] for path in own]
    assert found["dynamic_sampling_filter_path"] == ["a.b"]
    found = words(reward=[reward, "math"], run_dir="r", rm_weights=[1, 0.5])
    assert found["rm_type"] == [own[0], "math"] and found["rm_weights"] == ["1", "0.5"]


def test_a_wrong_configuration_is_one_line(words, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="config must be a YAML file, a list of files, a dict or a Config, got a int"
    ):
        words(3)
    with pytest.raises(
        ValueError, match="--config must name a YAML file that exists, got no.yaml; check the path"
    ):
        words("no.yaml")
    (tmp_path / "a.yaml").write_text("custom-rm-path: a.b\n")
    with pytest.raises(ValueError, match="reward must be one function with --custom-rm-path, got 2 rewards"):
        words("a.yaml", reward=["math", "f1"])


def test_a_configuration_has_the_same_flags_again(tmp_path: Path) -> None:
    """The flags of Megatron and of the engine belong to a configuration, too."""
    more = "--attention-softmax-in-fp32 --no-masked-softmax-fusion --rm-type math --lr 1e-3 --run-dir runs/x"
    config = parse_config([*good_argv(tmp_path), *more.split()])
    again = parse_config([token for group in all_flags(config) for token in group.tokens])
    assert dataclasses.replace(again, notes=()) == dataclasses.replace(config, notes=())
    engine = dataclasses.replace(config.engine, backend_argv=["--max-num-seqs", "7", "--enforce-eager"])
    with_engine = list(all_flags(dataclasses.replace(config, engine=engine)))[-2:]
    assert [group.tokens for group in with_engine] == [["--vllm-max-num-seqs", "7"], ["--vllm-enforce-eager"]]
    assert [group.name for group in with_engine] == ["vllm_max_num_seqs", "vllm_enforce_eager"]


def test_an_error_of_the_flags_is_that_of_the_command_line(tmp_path: Path) -> None:
    flags = {"num_rollouts": 3, "run_dir": tmp_path / "run"}
    with pytest.raises(ValueError, match="--num-rollouts is not a known flag; did you mean --num-rollout"):
        vime.train(parse_config(good_argv(tmp_path)), reward=reward, wait=False, **flags)
    assert not (tmp_path / "run").exists(), "nothing is left of a run that has not begun"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Returns a function that starts a program in place of `vime train`."""
    runs = []

    def start(program: str, *callbacks) -> live.LiveRun:
        monkeypatch.setattr(live, "CHILD", ("-c", program))
        runs.append(live.LiveRun([], tmp_path, callbacks))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


LINE = '{"step_key": "rollout/step", "step": %d, "time": 1.0, "rollout/raw_reward": 1.0}'


def rollouts(folder: Path, after: str) -> str:
    text = "".join(f"{LINE % number}\n" for number in range(3))
    return f"import sys, time; open({str(folder / 'metrics.jsonl')!r}, 'w').write({text!r}); {after}"


def test_callbacks_get_each_rollout_and_the_output_is_shown(started, tmp_path: Path, capsys) -> None:
    seen = []
    run = started(
        rollouts(tmp_path, "print('step 3'); print('a warning', file=sys.stderr)"), lambda *a: seen.append(a)
    )
    assert run.follow() is run and run.state == "finished"
    assert [(of is run, row["rollout"]) for of, row in seen] == [(True, 0), (True, 1), (True, 2)]
    shown = capsys.readouterr()
    assert shown.out == run.output == "step 3\n" and shown.err == "a warning\n"
    assert repr(run) == f"<vime run {tmp_path}: finished, rollout 2, reward 1>"


def test_an_error_of_a_callback_stops_the_run(started, tmp_path: Path) -> None:
    def fails(run, metrics):
        raise KeyError("mine")

    run = started(rollouts(tmp_path, "time.sleep(60)"), fails)
    with pytest.raises(KeyError, match="mine"):
        run.follow()
    assert run.state == "interrupted"


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        (
            "print('x\\nvime train: 2 problems:\\n  1. a', file=sys.stderr); sys.exit(2)",
            ValueError,
            "2 problems:\n  1. a",
        ),
        (
            "print('vime train: lost\\nmore in f', file=sys.stderr); sys.exit(1)",
            RuntimeError,
            "lost\nmore in f",
        ),
        ("sys.exit(3)", RuntimeError, "the process of the run ended with exit code 3"),
    ],
)
def test_an_end_with_an_error_raises_its_text(started, end: str, kind: type, text: str, capsys) -> None:
    with pytest.raises(kind) as error:
        started(f"import sys; {end}").follow()
    assert str(error.value) == text and "vime train" not in capsys.readouterr().err


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *a: sys.exit(130))
print('up', flush=True)
time.sleep(60)
"""


def test_stop_ends_the_run_and_is_no_error(started) -> None:
    run = started(SLOW)
    while "up" not in run.output:
        time.sleep(0.05)
    with pytest.raises(TimeoutError, match="the run must end within 0.1 s, got a running one"):
        run.wait(0.1)
    run.stop()
    assert run.wait(30).state == "interrupted"
    run.stop()  # after the end, it has no effect


def test_an_interrupt_of_the_caller_stops_the_run(started) -> None:
    run = started(SLOW)
    while "up" not in run.output:
        time.sleep(0.05)
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        run.follow()
    assert run.state == "interrupted"


def test_the_run_ends_with_its_caller(tmp_path: Path) -> None:
    """The child ends with SIGTERM when the pipe of its caller closes."""
    program = "import runpy, sys, time, vime.cli; vime.cli.main = lambda argv: time.sleep(60); "
    program += "sys.argv = ['child']; runpy.run_module('vime.api.child', run_name='__main__')"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.stdin.close()
    assert process.wait(20) == -signal.SIGTERM


def test_the_import_of_vime_stays_small() -> None:
    program = "import sys, vime; print(len([m for m in sys.modules if m.startswith(('vime.', 'slime'))]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 2 and "train" in dir(vime)
    with pytest.raises(AttributeError, match="module 'vime' has no attribute 'trian'"):
        vime.trian  # noqa: B018
