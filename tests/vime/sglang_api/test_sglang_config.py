"""--sglang-config: which layouts become flags, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slime.config.config_file import split_argv
from vime.sglang_api.translate_flags import translate_sglang


def translated(path: Path, model: object, more: str = "") -> str:
    path.write_text(yaml.safe_dump({"sglang": model if isinstance(model, list) else [model]}))
    groups, _ = translate_sglang(split_argv(f"--sglang-config {path} {more}".split()))
    return " ".join(" ".join([group.typed, *group.values]) for group in groups)


def test_equal_groups_become_flags(tmp_path: Path) -> None:
    group = {"worker_type": "regular", "num_gpus": 4, "overrides": {"mem-fraction-static": 0.7}}
    model = {"name": "actor", "model_path": "/m", "num_gpus_per_engine": 2, "server_groups": [group, group]}
    made = "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --vllm-gpu-memory-utilization 0.7"
    assert translated(tmp_path / "c.yaml", model, "--hf-checkpoint /m") == f"--hf-checkpoint /m {made}"
    same = "--hf-checkpoint /m --rollout-num-gpus 8"
    rest = "--rollout-num-gpus-per-engine 2 --vllm-gpu-memory-utilization 0.7"
    assert translated(tmp_path / "c.yaml", model, same) == f"{same} {rest}"


REGULAR = {"worker_type": "regular", "num_gpus": 4}


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        (
            {"name": "a", "server_groups": [{**REGULAR, "worker_type": "prefill"}]},
            "",
            "must be regular, got prefill",
        ),
        ({"name": "a", "server_groups": [{**REGULAR, "worker_type": "encoder"}]}, "", "text only"),
        ([{"name": "a"}, {"name": "b"}], "", r"must have one model, got 2 \(a, b\)"),
        ({"name": "a", "update_weights": False, "server_groups": [REGULAR]}, "", "must be true, got false"),
        (
            {"name": "a", "model_path": "/x", "server_groups": [REGULAR]},
            "--hf-checkpoint /m",
            "must be that of",
        ),
        ({"name": "a", "server_groups": [REGULAR]}, "--rollout-num-gpus 8", "got 8 and 4"),
        ({"name": "a", "server_groups": [REGULAR, {**REGULAR, "num_gpus_per_engine": 2}]}, "", "are equal"),
        ({"name": "a", "server_groups": []}, "", "must have a group, got none"),
        ({"name": "a", "wrong": 1, "server_groups": [REGULAR]}, "", "got wrong"),
    ],
)
def test_other_layouts_are_errors(tmp_path: Path, model: object, more: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        translated(tmp_path / "c.yaml", model, more)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--sglang-config must name a file, got .* .No such file"):
        translate_sglang(split_argv(["--sglang-config", str(tmp_path / "no.yaml")]))
