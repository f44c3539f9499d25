"""Tests the names that plug-ins import from slime.rollout.sglang_rollout and upstream vime's vllm_rollout."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace

import pytest
from rollout_double import make_args, make_state

from slime.rollout.sglang_rollout import GenerateState, abort, get_model_url


def test_whoever_asks_gets_the_runs_own_state():
    args = make_args()
    own = make_state(args)
    assert GenerateState(args) is own and GenerateState(copy.deepcopy(args)) is own
    assert GenerateState(SimpleNamespace()) is own, "arguments that a hook made itself"
    assert own.args is args and own.processor is None and own.aborted is False
    newer = make_state(make_args())
    assert GenerateState(args) is newer
    newer.close()
    assert GenerateState(args) is own, "the run that ended is forgotten"
    assert own.semaphore._value == own.concurrency
    wanted = {"max_new_tokens": args.rollout_max_response_len, "temperature": args.rollout_temperature}
    assert wanted.items() <= own.sampling_params.items()
    assert own.sampling_params["no_stop_trim"] is True


def test_without_a_rollout_there_is_no_state(monkeypatch):
    monkeypatch.setattr("slime.rollout.state._entered", [])
    with pytest.raises(RuntimeError, match="must be called while a rollout runs"):
        GenerateState(SimpleNamespace())


def test_abort_ends_what_runs():
    args = make_args()
    own = make_state(args)
    assert asyncio.run(abort(args, 0)) == []
    assert own.aborted and own.engine.aborts == 1


def test_model_urls():
    args = SimpleNamespace(router_url="http://10.0.0.1:3000")
    assert get_model_url(args, "default") == "http://10.0.0.1:3000/generate"
    args.model_routers = {"judge": "http://10.0.0.2:4000"}
    assert get_model_url(args, "judge", "/v1/completions") == "http://10.0.0.2:4000/v1/completions"
    with pytest.raises(ValueError, match=r"name must be one of \['judge'\], got 'actor'"):
        get_model_url(args, "actor")
