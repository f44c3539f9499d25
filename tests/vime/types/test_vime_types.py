"""The types of hooks agree with the calls of a run, and mypy understands them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import vime.types as vt
from slime.config.hook_calls import CALLS

ROOT = Path(__file__).parents[3]
USER = """
import vime
import vime.types as vt


def reward(args: vt.Args, sample: vt.Sample) -> float:
    return float(str(sample.label) in sample.response)


def trl(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    return [float(a in c) for a, c in zip(answer, completions, strict=True)]


def wrong(args: vt.Args, sample: vt.Sample) -> str:
    return sample.response


checked: vt.Reward = reward
run = vime.train({"num_rollout": 1}, reward=reward)
vime.train("a.yaml", reward=[trl, "math"], callbacks=[lambda run, metrics: run.stop()])
reveal_type(run.metrics)
reveal_type(run.samples[0].response)
vime.train({"num_rollout": 1}, reward=wrong)
vime.train({"num_rollout": 1}, filter=reward)
"""


@pytest.mark.parametrize("name", vt.HOOKS)
def test_a_type_has_the_arguments_of_the_call(name: str) -> None:
    parameters = list(inspect.signature(vt.HOOKS[name].__call__).parameters.values())[1:]
    assert [one.name for one in parameters] == CALLS[name].positional.split()
    assert all(one.kind is inspect.Parameter.POSITIONAL_ONLY for one in parameters)


@pytest.mark.slow
def test_mypy_understands_the_api(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "user.py")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert 'note: Revealed type is "list[dict[str, float]]"' in said and 'is "str"' in said
    wrong = [line for line in said.splitlines() if ": error:" in line]
    lines, call = USER.splitlines(), 'vime.train({"num_rollout": 1}, %s)'
    places = [lines.index(call % one) + 1 for one in ("reward=wrong", "filter=reward")]
    assert [int(line.split(":")[1]) for line in wrong] == places, said
