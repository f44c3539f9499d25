"""Tests --vllm-config and --sglang-config: layouts that become flags, and the messages for other layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.config.config_file import FlagGroup, split_argv
from vime.sglang.server_flags import translate
from vime.sglang_api.translate_flags import translate_sglang


def groups_of(path: Path, model: object, more: str = "", key: str = "sglang") -> list[FlagGroup]:
    path.write_text(yaml.safe_dump({key: model if isinstance(model, list) else [model]}, sort_keys=False))
    groups, _ = translate_sglang(split_argv(f"--{key}-config {path} {more}".split()))
    return groups


def translated(path: Path, model: object, more: str = "", key: str = "sglang") -> str:
    return " ".join(" ".join([group.typed, *group.values]) for group in groups_of(path, model, more, key))


def test_equal_groups_become_flags(tmp_path: Path) -> None:
    group = {"worker_type": "regular", "num_gpus": 4, "overrides": {"mem-fraction-static": 0.7}}
    model = {"name": "actor", "model_path": "/m", "num_gpus_per_engine": 2, "server_groups": [group, group]}
    made = "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --vllm-gpu-memory-utilization 0.7"
    given = "--hf-checkpoint /m"
    assert translated(tmp_path / "c.yaml", model, given) == f"{given} --policy-name actor {made}"
    same = "--hf-checkpoint /m --rollout-num-gpus 8"
    rest = "--policy-name actor --rollout-num-gpus-per-engine 2 --vllm-gpu-memory-utilization 0.7"
    assert translated(tmp_path / "c.yaml", model, same) == f"{same} {rest}"


REGULAR = {"worker_type": "regular", "num_gpus": 4}
ACTOR = {"name": "actor", "server_groups": [REGULAR]}


def frozen(groups: list[FlagGroup]) -> list[dict[str, Any]]:
    return [json.loads(group.values[0]) for group in groups if group.name == "frozen_model"]


def test_other_models_are_frozen(tmp_path: Path) -> None:
    """The policy is the model that is marked so, or that has its checkpoint. The other models keep their
    checkpoints."""
    judge = {
        "name": "judge",
        "model_path": "/j",
        "num_gpus_per_engine": 2,
        "server_groups": [
            {
                "worker_type": "regular",
                "num_gpus": 2,
                "overrides": {"max-model-len": 64, "enable_prefix_caching": False},
            }
        ],
    }
    path = tmp_path / "c.yaml"
    made = {
        "name": "judge",
        "model_path": "/j",
        "num_gpus": 2,
        "num_gpus_per_engine": 2,
        "args": ["max-model-len=64", "no-enable-prefix-caching"],
        "file": str(path),
    }
    groups = groups_of(path, [judge, ACTOR], "--hf-checkpoint /m --rollout-num-gpus 6", key="vllm")
    assert frozen(groups) == [made]
    # slime's --rollout-num-gpus counts every model's devices.
    assert [group.values for group in groups if group.name == "rollout_num_gpus"] == [["4"]]
    groups = groups_of(
        path, [judge | {"update_weights": True}, ACTOR | {"model_path": "/a"}], "--hf-checkpoint /j", "vllm"
    )
    assert [entry["name"] for entry in frozen(groups)] == ["actor"]
    judge["server_groups"][0]["overrides"] = {
        "context-length": 64,
        "disable-radix-cache": True,
        "disable-cuda-graph": False,
    }  # type: ignore[index]
    assert frozen(groups_of(path, [judge, ACTOR]))[0]["args"] == [
        "max-model-len=64",
        "no-enable-prefix-caching",
    ]
    groups, _ = translate(split_argv(["--sglang-config", str(path)]))
    assert frozen(groups)[0]["args"] == ["context-length=64", "disable-radix-cache"]


def test_groups_for_prefill_and_decode(tmp_path: Path) -> None:
    """Only the policy's engines have such groups."""
    split = [{**REGULAR, "worker_type": kind} for kind in ("prefill", "decode")]
    model = {"name": "a", "num_gpus_per_engine": 2, "server_groups": split}
    made = "--policy-name a --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --prefill-num-servers 2"
    assert translated(tmp_path / "c.yaml", model) == made
    with pytest.raises(ValueError, match="the groups of a in .* must be regular, got prefill and decode"):
        translated(tmp_path / "c.yaml", [ACTOR, {**model, "model_path": "/x", "update_weights": False}])


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        (
            {"name": "a", "server_groups": [{**REGULAR, "worker_type": "encoder"}]},
            "",
            "must be one of regular, prefill, decode, got encoder .this version takes text only",
        ),
        (
            {"name": "a", "server_groups": [{**REGULAR, "worker_type": "prefill"}, REGULAR]},
            "",
            "the groups of a in .* must be regular, or prefill and decode, got prefill, regular",
        ),
        (
            [ACTOR, {**ACTOR, "name": "b"}],
            "",
            r"must have one model with update_weights: true.* got 2 \(actor, b\)",
        ),
        ([ACTOR, ACTOR], "", "must have one model of each name, got 2 models with the names actor"),
        (
            {"name": "a", "update_weights": False, "server_groups": [REGULAR]},
            "",
            "which gets the trainer's weights, got 0",
        ),
        (
            [ACTOR, {**ACTOR, "name": "b", "update_weights": False}],
            "",
            "model_path of b in .* must be given, got none",
        ),
        (
            {"name": "a", "model_path": "/x", "server_groups": [REGULAR]},
            "--hf-checkpoint /m",
            "must be that of",
        ),
        ({"name": "a", "server_groups": [REGULAR]}, "--rollout-num-gpus 8", "got 8 and 4"),
        ({"name": "a", "server_groups": [REGULAR, {**REGULAR, "num_gpus_per_engine": 2}]}, "", "are equal"),
        (
            {"name": "a", "server_groups": [{**REGULAR, "num_gpus": 0}]},
            "",
            "num_gpus of a in .* above 0, got 0",
        ),
        ({"name": "a", "server_groups": []}, "", "must have a group, got none"),
        ({"name": "a", "wrong": 1, "server_groups": [REGULAR]}, "", "got wrong"),
        ({"name": "a", "server_groups": ["x"]}, "", "got x"),
        (
            [
                ACTOR,
                {
                    "name": "b",
                    "model_path": "/x",
                    "server_groups": [{**REGULAR, "overrides": {"trust-remote-code": True}}],
                },
            ],
            "--hf-checkpoint /m",
            "overrides of b in .* must be flags of its engines",
        ),
    ],
)
def test_other_layouts_are_errors(tmp_path: Path, model: object, more: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        translated(tmp_path / "c.yaml", model, more)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--sglang-config must name a file, got .* .No such file"):
        translate_sglang(split_argv(["--sglang-config", str(tmp_path / "no.yaml")]))
    with pytest.raises(ValueError, match="must name one YAML file, got a b; give one path"):
        translate_sglang(split_argv(["--sglang-config", "a", "--vllm-config", "b"]))
    (tmp_path / "vllms.yaml").write_text("port: 8000\n")  # a file for vLLM's own --config
    with pytest.raises(ValueError, match="must have a list of models under sglang or vllm, got"):
        translate_sglang(split_argv(["--vllm-config", str(tmp_path / "vllms.yaml")]))
