"""A rollout backend is one object and one line in vime.backends."""

from __future__ import annotations

import dataclasses
import json

import pytest
from config_cases import good_argv

from slime.config import Config
from vime import backends
from vime.vllm.backend import VllmBackend


class Added(VllmBackend):
    """Another backend, whose engines leave more of a GPU free."""

    name = "added"

    def fields(self, own, given):
        fields = super().fields(own, given)
        facts = dataclasses.replace(fields["engine_facts"], project="Added", memory_share=0.5)
        return {**fields, "engine_facts": facts}


def test_a_backend_is_picked_by_its_line(tmp_path, monkeypatch):
    argv = good_argv(tmp_path)
    with pytest.raises(ValueError, match="--rollout-backend must be one of vllm, sglang, got added"):
        backends.parse_config([*argv, "--rollout-backend", "added"])
    monkeypatch.setitem(backends.BACKENDS, "added", Added())
    c = backends.parse_config([*argv, "--rollout-backend", "added"])
    assert (c.engine.engine_facts.project, c.engine.engine_facts.memory_share) == ("Added", 0.5)
    assert backends.backend_for(c).name == "added"
    (row,) = [row for row in backends.public_rows() if row["flag"] == "--rollout-backend"]
    assert row["choices"] == ["vllm", "sglang", "added"]


def test_hooks_find_the_backends_arguments_and_a_saved_file_loads(tmp_path):
    c = backends.parse_config([*good_argv(tmp_path), "--vllm-server-concurrency", "7"])
    args = c.namespace(vllm_router_port=5)
    assert (args.vllm_server_concurrency, args.server_concurrency) == (7, 7)
    assert (args.vllm_router_ip, args.vllm_router_port, args.use_slime_router) == (None, 5, False)
    c.save_json(tmp_path / "saved.json")
    assert Config.from_dict(json.loads((tmp_path / "saved.json").read_text())) == c


def test_a_concurrency_that_adapts_is_a_number_for_hooks(tmp_path):
    for flag in ("--vllm-server-concurrency", "--sglang-server-concurrency"):
        c = backends.parse_config([*good_argv(tmp_path), flag, "auto"])
        assert (c.engine.server_concurrency, c.engine.adapts_concurrency) == (512, True)
        assert c.namespace().vllm_server_concurrency == 512
    assert not backends.parse_config(good_argv(tmp_path)).engine.adapts_concurrency
    with pytest.raises(ValueError, match="--vllm-server-concurrency must be of type int_or_auto, got 'most'"):
        backends.parse_config([*good_argv(tmp_path), "--vllm-server-concurrency", "most"])


def test_concurrency_must_be_above_zero(tmp_path):
    with pytest.raises(ValueError, match="--vllm-server-concurrency must be above 0, got 0"):
        backends.parse_config([*good_argv(tmp_path), "--vllm-server-concurrency", "0"])
