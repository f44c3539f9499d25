"""Tests the settings of PyTorch's allocator that trainers start with."""

from __future__ import annotations

import os

import pytest

from slime.cluster import actors
from slime.config import Config
from slime.system.allocator import VARIABLES


@pytest.mark.parametrize(
    ("before", "flag", "after"),
    [
        ({}, {}, ["expandable_segments:True", None]),
        ({}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, ["max_split_size_mb:64", None]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}, [None, "max_split_size_mb:64"]),
        ({"PYTORCH_ALLOC_CONF": ""}, {}, ["", None]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {"PYTORCH_ALLOC_CONF": "b:2"}, ["b:2", None]),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "b:2"}, [None, "b:2"]),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_trainer_on_a_gpu_expands_segments(monkeypatch, device, before, flag, after) -> None:
    monkeypatch.setattr(actors, "log_to", lambda *_: None)
    monkeypatch.setattr(os, "environ", dict(before))
    actors.TrainerActor(Config.from_flat({"device": device, "train_env_vars": flag}), "trainer", 0, 0, {}, ())
    if device == "cpu":
        assert os.environ == before | flag
    else:
        assert [os.environ.get(name) for name in VARIABLES] == after


@pytest.mark.parametrize(
    "flag", [{"nccl_ub": True}, {"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}]
)
def test_registered_buffers_and_graphs_are_in_plain_segments(monkeypatch, flag) -> None:
    monkeypatch.setattr(actors, "log_to", lambda *_: None)
    monkeypatch.setattr(os, "environ", {})
    config = Config.from_flat({"device": "cuda", "overrides": flag})
    actors.TrainerActor(config, "trainer", 0, 0, {}, ())
    assert not os.environ
