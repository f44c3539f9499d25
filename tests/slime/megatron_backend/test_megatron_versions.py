"""Tests the one file with rules for versions of megatron-core, and the trainer on the version that is not installed
here.

scripts/setup.sh unpacks the megatron-core of the other Pythons next to the environment. Its Python code also runs on
this Python, so a process with that folder first on the path runs the trainer on the other version.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import megatron_names
import megatron_resume
import pytest
import torch
from config_cases import good_argv
from packaging.requirements import Requirement
from safetensors.torch import load_file

from slime.bridges import megatron_versions
from slime.bridges.megatron_versions import LAST, LEAST, RUN, check, installed
from slime.rules import parse_args

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "slime"
OTHER = next((version for version in RUN if version != installed()), "")
QUICK = ("test_prediction.py", "test_families.py")
ALL = [
    f"test_{name}.py"
    for name in [
        "trainer",
        "torch_dist",
        "routing_replay",
        "latent",
        "gated_delta_net",
        "mamba",
        "megatron_attention",
        "megatron_checkpoint",
        "megatron_cpu_device",
        "megatron_experts",
        "megatron_glm",
        "megatron_layers",
        "megatron_model_config",
        "freezing",
        "host_adam",
        "async_save",
        "trainer_saves",
        "megatron_optimizer",
        "muon",
        "megatron_parallel",
        "megatron_weights",
        "residence",
        "trainer_heads",
        "trainer_parallel",
        "trainer_replay",
        "trainer_experts",
        "prediction_trainer",
        "torch_dist_parallel",
        "torch_dist_trainer",
        "megatron_experts_parallel",
        "families_parallel",
        "direct_loading",
        "config_megatron",
        "stages",
        "shared_prompts",
        "consistency",
    ]
]


@pytest.fixture(scope="module")
def other() -> dict[str, str]:
    """Returns the environment of a process that gets the other megatron-core."""
    folder = Path(sys.prefix) / f"megatron-core-{OTHER}"
    assert (folder / "megatron/core").is_dir(), f"{folder} is missing; run scripts/setup.sh"
    paths = [str(folder), str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("version", RUN)
def test_versions_that_were_run(version):
    assert check(version) is None


@pytest.mark.parametrize("version", ["0.15.3", "0.9.0", "0.15.0rc1"])
def test_older_ones_are_refused(version):
    with pytest.raises(ValueError) as error:
        check(version)
    assert str(error.value).startswith(
        f"megatron-core must be 0.16 or newer, got {version}; install a tested one"
    )


@pytest.mark.parametrize(
    ("version", "place"),
    [("0.18.1", "between 0.16 and 0.19"), ("0.20.0rc1", "newer than 0.19"), ("1.0.0", "newer")],
)
def test_others_are_noted(version, place):
    remark = check(version)
    assert remark is not None and remark.startswith(f"megatron-core {version} is {place}")
    assert remark.endswith("never run here; run were 0.16.1 on CPUs and GPUs and 0.19.2 on CPUs and one GPU")


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt"])
def test_the_versions_are_those_that_are_installed(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    named = [Requirement(line) for line in lines if line.startswith("megatron-core")]
    assert [str(r.specifier).removeprefix("==") for r in named] == list(RUN)
    assert [str(r.marker) for r in named] == ['python_version < "3.12"', 'python_version >= "3.12"']
    numbers = [tuple(map(int, version.split(".")[:2])) for version in RUN]
    assert (numbers[0], numbers[-1]) == (LEAST, LAST)


def test_nothing_else_asks_for_a_version():
    asks = r"megatron-core 0\.\d|megatron\.core\.__version__|metadata\.version\(.megatron|package_info"
    found = {
        path.relative_to(ROOT).as_posix()
        for package in ("vime", "slime")
        for path in (ROOT / package).rglob("*.py")
        if re.search(asks, path.read_text())
    }
    assert found == {"slime/bridges/megatron_versions.py"}


def test_a_run_is_told_of_its_version(tmp_path, monkeypatch):
    argv = good_argv(tmp_path)

    def notes(version: str | None) -> list[str]:
        monkeypatch.setattr(megatron_versions, "installed", lambda: version)
        return [note for note in parse_args(argv).notes if "megatron-core" in note]

    assert notes("0.19.2") == notes("0.16.1") == notes(None) == []  # `vime plan` works without it
    assert notes("0.21.0")[0].startswith("megatron-core 0.21.0 is newer than 0.19")
    with pytest.raises(ValueError, match=r"megatron-core must be 0\.16 or newer, got 0\.15\.3"):
        notes("0.15.3")


@pytest.mark.slow
def test_a_checkpoint_of_either_version_continues_on_the_other(root, tmp_path, other):
    """The bits are equal, optimizer and schedule included."""
    wanted = megatron_resume.saved(root, tmp_path / "here")
    run(
        other,
        megatron_resume.__file__,
        str(root),
        str(tmp_path / "here"),
        str(tmp_path / "there"),
    )
    continued, saved = (
        load_file(tmp_path / "there" / f"{name}.safetensors") for name in ("continued", "saved")
    )
    again = megatron_resume.continued(root, tmp_path / "there")
    assert wanted.keys() == continued.keys() == saved.keys() == again.keys()
    for name, tensor in wanted.items():
        assert all(torch.equal(tensor, of[name]) for of in (continued, saved, again)), name


def test_all_names_are_in_both_versions(other):
    """The test covers slime's imports, the attributes and keywords that slime uses, and the methods that it
    replaces."""
    here = megatron_names.look()
    there = json.loads(run(other, megatron_names.__file__))
    # In a git checkout, newer versions add the commit of the current folder.
    assert [found["version"].partition("+")[0] for found in (here, there)] == [installed(), OTHER]
    assert here["problems"] == there["problems"] == []
    assert here["checked"] == there["checked"] > 250
    assert here["replaced"] == there["replaced"]


def rename_function(monkeypatch):
    from megatron.core import parallel_state

    monkeypatch.delattr(parallel_state, "get_context_parallel_group")


def rename_keyword(monkeypatch):
    from megatron.core import dist_checkpointing

    monkeypatch.setattr(dist_checkpointing, "save", lambda sharded_state_dict, checkpoint_dir, strategy: None)


def rename_field(monkeypatch):
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

    from slime.megatron_backend.model.moe import experts

    monkeypatch.setattr(experts, "MoESubmodules", lambda experts, router, shared: MoESubmodules)


@pytest.mark.parametrize(
    ("rename", "problem"),
    [
        (rename_function, "parallel.py: parallel_state has no get_context_parallel_group"),
        (rename_keyword, "distributed.py: dist_checkpointing.save does not take its arguments: "),
        (rename_field, "experts.py: MoESubmodules does not take its arguments: "),
    ],
)
def test_a_renamed_thing_is_found(rename, problem, monkeypatch):
    rename(monkeypatch)
    assert [found for found in megatron_names.look()["problems"] if found.startswith(problem)]


def test_a_renamed_method_is_found(monkeypatch):
    from megatron.core.transformer.moe.router import TopKRouter

    before = megatron_names.look()["replaced"]
    monkeypatch.delattr(TopKRouter, "_apply_expert_bias")
    lost = set(before) - set(megatron_names.look()["replaced"])
    assert lost == {"slime.megatron_backend.model.moe.experts.Router._apply_expert_bias"}


def passes(environment: dict[str, str], *names: str) -> None:
    files = [str(next(TESTS.rglob(name))) for name in names]
    run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)


@pytest.mark.slow
def test_the_trainer_runs_on_the_other_version(other):
    passes(other, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_of_the_trainer_runs_on_the_other_version(other, name):
    passes(other, name)
