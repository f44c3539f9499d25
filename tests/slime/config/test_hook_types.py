"""Tests the types of hooks: the calls that a run's checks accept, and functions that mypy rejects."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from argparse import Namespace
from pathlib import Path

import pytest

from slime.config.hook_calls import CALLS
from slime.protocols import hooks as hook_types

TYPES = {
    "Reward": "custom_rm_path",
    "Generate": "custom_generate_function_path",
    "SampleHook": "rollout_sample_hook_path",
    "DynamicFilter": "dynamic_sampling_filter_path",
    "SampleFilter": "rollout_sample_filter_path",
    "BufferFilter": "buffer_filter_path",
    "Rollout": "rollout_function_path",
    "RolloutLog": "custom_rollout_log_function_path",
    "RewardPostProcess": "custom_reward_post_process_path",
    "TrainData": "custom_convert_samples_to_train_data_path",
}
CHECKED = """
from argparse import Namespace
from slime.protocols.hooks import DynamicFilter, Generate, GroupReward, Reward
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.types import Sample

def short(args: Namespace, sample: Sample, **kwargs: object) -> float:
    return 1 / (1 + len(sample.response))

async def waits(args: Namespace, sample: Sample) -> dict[str, object]:
    return {"score": 1.0}

async def group(args: Namespace, samples: list[Sample]) -> list[float]:
    return [0.0 for _ in samples]

async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, object]) -> Sample:
    return sample

def text(args: Namespace, sample: Sample) -> str:
    return "1"

good: tuple[Reward, Reward, GroupReward, Generate, DynamicFilter] = (
    short, waits, group, generate, check_reward_nonzero_std
)
returns_text: Reward = text
other_arguments: Generate = group
"""


@pytest.mark.parametrize(("name", "field"), TYPES.items())
def test_a_type_has_the_arguments_of_the_call(name, field):
    call = CALLS[field]
    if name == "Rollout":
        parameters = inspect.signature(hook_types.Rollout.__call__).parameters.values()
        positional = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_ONLY]
        keywords = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
        assert (positional, keywords) == (["self", *call.positional.split()], call.keywords.split())
        return
    parameters, _ = typing.get_args(getattr(hook_types, name))
    assert len(parameters) == len(call.positional.split()) and not call.keywords
    assert parameters[call.positional.split().index("args")] is Namespace
    shown = ", ".join(call.positional.split())
    assert f"({shown})" in Path(hook_types.__file__).read_text().split(f"\n{name}: ")[1].split('"""')[1]


@pytest.mark.slow
def test_mypy_accepts_hooks_and_refuses_other_functions(tmp_path: Path):
    (tmp_path / "hooks.py").write_text(CHECKED)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run([*command, str(tmp_path / "hooks.py")], capture_output=True, text=True)
    found = re.findall(r'error: .*, variable has type "Callable\[\[([\w, ]+)', done.stdout)
    assert found == ["Namespace, Sample", "Namespace, Sample, dict"], done.stdout
    assert "Found 2 errors" in done.stdout
