"""Tests --rm-type ifbench with the real checks of the package if-verifiable."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest
from config_cases import good_argv

from slime.rollout.rewards import async_rm
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rules import packages, parse_args
from slime.types import Sample

NUMBERS = {"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 2, "small_n": None}]}
BOTH = {
    "instruction_id_list": ["count:numbers", "format:no_whitespace"],
    "kwargs": [{"N": 2}, {}],
    "prompt_text": "Write two numbers.",
}


def reward(response: str, metadata: dict) -> float:
    args = SimpleNamespace(rm_type="ifbench", custom_rm_path=None)
    return asyncio.run(async_rm(args, Sample(index=7, group_index=2, response=response, metadata=metadata)))


@pytest.mark.parametrize(
    ("response", "metadata", "wanted"),
    [
        ("12 and 13", NUMBERS, 1.0),
        ("12", NUMBERS, 0.0),
        ("<think>1 2 3</think>12 and 13", NUMBERS, 1.0),
        ("a12.b13", BOTH, 1.0),
        ("12 13", BOTH, 0.0),
        ("", NUMBERS, 0.0),
        ("aWord", {"instruction_id_list": "format:no_whitespace"}, 1.0),
    ],
)
def test_all_instructions_must_be_followed(response, metadata, wanted):
    assert reward(response, metadata) == wanted
    assert compute_ifbench_reward(response, None, metadata) == wanted


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "must have a list of ids in instruction_id_list, got None; add it"),
        ({"instruction_id_list": []}, "must have a list of ids in instruction_id_list, got "),
        (
            {"instruction_id_list": ["keywords:x"]},
            "must name instructions of IFBench, got 'keywords:x'; correct",
        ),
        (NUMBERS | {"kwargs": [{}, {}]}, "must have an object per instruction, got .* for 1; correct"),
        (NUMBERS | {"kwargs": "x"}, "must have an object per instruction, got 'x' for 1; correct"),
    ],
)
def test_wrong_metadata_are_errors_also_for_an_empty_response(metadata, message):
    for response in ("12 13", ""):
        with pytest.raises(ValueError, match=message):
            reward(response, metadata)


def test_missing_data_of_nltk_end_the_run(monkeypatch):
    """Without this error, every response would count as no answer."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    metadata = {"instruction_id_list": ["words:start_verb"]}
    with pytest.raises(
        RuntimeError, match="must have NLTK's data, got none for one of words:start_verb; python"
    ):
        reward("two words", metadata)


def test_a_missing_package_is_an_error_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda module: module != "if_verifiable")
    with pytest.raises(ValueError) as error:
        parse_args([*good_argv(tmp_path), "--rm-type", "ifbench"])
    assert str(error.value) == (
        "--rm-type ifbench must have the package if-verifiable, got none installed; pip install if-verifiable, or "
        "leave the flag out"
    )
    monkeypatch.setitem(sys.modules, "if_verifiable.common", None)
    with pytest.raises(
        ValueError, match="must have the package if-verifiable, got .*; pip install if-verifiable"
    ):
        reward("x", NUMBERS)
