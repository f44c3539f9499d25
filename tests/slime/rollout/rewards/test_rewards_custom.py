"""Tests custom rewards by dotted path, the values they may return, and load_function itself."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy
import pytest

from slime.hooks import load_function
from slime.rollout.rewards import async_rm, batched_async_rm
from slime.types import Sample

MODULE = """
import threading

async def length(args, sample, **kwargs):
    return len(sample.response) + kwargs.get("bonus", 0)

def plain(args, sample):
    return {"score": 0.5, "thread": threading.get_ident()}

async def batch(args, samples):
    return [float(sample.index) for sample in samples]

def short_batch(args, samples):
    return [1.0]

async def fails(args, sample):
    return 1 / 0

async def value(args, sample):
    return args.value

class Judge:
    def __init__(self, args, sample):
        pass

constant = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import no_such_dependency")
    (tmp_path / "raising_rewards.py").write_text("raise OSError('disk on fire')")
    monkeypatch.syspath_prepend(tmp_path)


def args(path: str | None, **more) -> SimpleNamespace:
    return SimpleNamespace(custom_rm_path=path, rm_type="gsm8k", **more)


def samples() -> list[Sample]:
    return [Sample(index=i, group_index=1, response="x" * i, label="1") for i in range(3)]


def test_async_function_and_its_keyword_arguments(module):
    assert asyncio.run(async_rm(args("my_rewards.length"), samples()[2])) == 2.0
    assert asyncio.run(async_rm(args("my_rewards.length"), samples()[2], bonus=3)) == 5.0


def test_plain_function_runs_off_the_event_loop(module):
    result = asyncio.run(async_rm(args("my_rewards.plain", reward_key="score"), samples()[0]))
    assert result["score"] == 0.5 and result["thread"] != threading.get_ident()


def test_a_time_limit_by_signals_gets_an_error_with_the_remedy(module, tmp_path):
    (tmp_path / "alarmed.py").write_text(
        "import signal\n"
        "def score(args, sample):\n"
        "    signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "    signal.alarm(5)\n"
    )
    with pytest.raises(
        ValueError, match=r"signal only works in main thread .*give --reward-deadline-s, or .*process"
    ):
        asyncio.run(async_rm(args("alarmed.score"), samples()[0]))


def test_path_of_the_sample_comes_first(module):
    sample = samples()[2]
    sample.custom_rm_path = "my_rewards.length"
    assert asyncio.run(async_rm(args("my_rewards.fails"), sample)) == 2.0


def test_batch_function_gets_all_samples(module):
    assert asyncio.run(batched_async_rm(args("my_rewards.batch", group_rm=True), samples())) == [
        0.0,
        1.0,
        2.0,
    ]
    mixed = samples()
    mixed[0].custom_rm_path = "my_rewards.value"
    assert asyncio.run(batched_async_rm(args("my_rewards.batch", value=9), mixed)) == [9.0, 1.0, 2.0]


def test_batch_function_of_wrong_length(module):
    with pytest.raises(
        ValueError, match=r"the 3 samples from sample 0 of group 1: .* list of 3 rewards, got 1"
    ):
        asyncio.run(batched_async_rm(args("my_rewards.short_batch"), samples()))
    with pytest.raises(ValueError, match=r"list of 3 rewards, got a int"):
        asyncio.run(batched_async_rm(args("my_rewards.value", value=3), samples()))


def test_exception_names_the_sample_and_keeps_its_cause(module):
    with pytest.raises(
        RuntimeError, match=r"reward my_rewards.fails failed for sample 1 of group 1: ZeroDiv"
    ) as e:
        asyncio.run(async_rm(args("my_rewards.fails"), samples()[1]))
    assert isinstance(e.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("bad", [None, "1", [1.0], {"score": "1"}])
def test_value_that_is_no_reward(module, bad):
    with pytest.raises(ValueError, match="sample 1 of group 1: a reward must be a number or a dict"):
        asyncio.run(async_rm(args("my_rewards.value", value=bad, reward_key="score"), samples()[1]))


@pytest.mark.parametrize(
    ("value", "reward"), [(True, 1.0), (numpy.True_, 1.0), (numpy.float32(0.5), 0.5), (2, 2.0)]
)
def test_numbers_become_floats(module, value, reward):
    result = asyncio.run(async_rm(args("my_rewards.value", value=value), samples()[1]))
    assert result == reward and type(result) is float


def test_load_function(module):
    from slime.utils.misc import load_function as slime_path

    assert slime_path is load_function
    assert load_function("os.path.join")("a", "b") == "a/b"
    assert load_function("my_rewards.Judge").__name__ == "Judge"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("length", "--custom-rm-path must be a dotted path such as my_module.my_function, got 'length'"),
        ("no/such_file.py:fn", "must name a file that exists, got 'no/such_file.py:fn'; check the path"),
        ("no/such_file.py:", "must name a file that exists, got 'no/such_file.py:'; check the path"),
        ("no/such_file.txt:fn", "--custom-rm-path must be a dotted path"),
        (None, "--custom-rm-path must be a dotted path such as my_module.my_function, got None"),
        ("no_such_module.fn", "there is no module 'no_such_module'; add its folder to PYTHONPATH"),
        ("my_rewards.sub.fn", "'my_rewards.sub.fn'"),
        ("broken_rewards.fn", "got 'broken_rewards.fn': No module named 'no_such_dependency'"),
        ("raising_rewards.fn", "importing raising_rewards raised OSError: disk on fire"),
        ("my_rewards.lenght", "got 'lenght'; did you mean my_rewards.length?"),
        ("my_rewards.zzzzzz", "must name a function of my_rewards, got 'zzzzzz'; write my_rewards."),
        ("my_rewards.constant", "must name a function or class, got 'my_rewards.constant' of type int"),
    ],
)
def test_load_function_errors(module, path, message):
    with pytest.raises(ValueError) as error:
        load_function(path, flag="--custom-rm-path")
    assert str(error.value).startswith("--custom-rm-path must ") and message in str(error.value)
