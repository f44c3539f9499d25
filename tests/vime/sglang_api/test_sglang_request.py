"""Tests the fields of SGLang's POST /generate that an engine reads. With an engine: e2e/engines/gateway_cases.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vime.sglang_api.request import MAX_NEW_TOKENS, OneRequest, WantedOutput, parse


def body(**fields: Any) -> bytes:
    return json.dumps({"input_ids": [5, 6], **fields}).encode()


def test_defaults() -> None:
    request = parse(body())
    assert request.each == [OneRequest([5, 6], {"max_tokens": MAX_NEW_TOKENS}, None)]
    assert request.wanted == WantedOutput() and not request.stream and not request.batched


def test_every_parameter_has_its_name_in_vllm() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "max_new_tokens": None,
        "min_new_tokens": 2,
        "stop": ["a"],
        "stop_token_ids": [3],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "ignore_eos": True,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "logit_bias": {"7": -1.0},
        "sampling_seed": 11,
        "n": 1,
        "regex": None,
    }
    assert parse(body(sampling_params=given)).each[0].params == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "min_tokens": 2,
        "stop": ["a"],
        "stop_token_ids": [3],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "logit_bias": {"7": -1.0},
        "seed": 11,
    }


def test_null_is_the_default() -> None:
    params = (
        parse(body(sampling_params={"temperature": None, "stop": None, "stop_token_ids": []})).each[0].params
    )
    assert params == {"max_tokens": MAX_NEW_TOKENS}


def test_several_prompts_and_samples() -> None:
    request = parse(body(input_ids=[[1], [2, 3]], sampling_params={"n": 2, "seed": 4}, rid=["a", "b"]))
    assert request.batched
    found = [(one.prompt, one.params["seed"], one.rid) for one in request.each]
    assert found == [([1], 4, "a-0"), ([1], 5, "a-1"), ([2, 3], 4, "b-0"), ([2, 3], 5, "b-1")]
    texts = parse(
        json.dumps({"text": ["x"], "sampling_params": [{"max_new_tokens": 3}], "rid": "r"}).encode()
    )
    assert texts.each == [OneRequest("x", {"max_tokens": 3}, "r")] and texts.batched


def test_what_the_answer_must_hold() -> None:
    more = {"logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    assert parse(body(return_logprob=True, **more)).wanted == WantedOutput(True, 0, 2, True, False)
    assert parse(body(return_logprob=True, logprob_start_len=-1)).wanted == WantedOutput(
        True, None, 0, False, False
    )
    assert parse(body(return_logprob=False, **more)).wanted == WantedOutput(False, None, 0, True, False)
    assert parse(body(return_routed_experts=True, stream=True)).wanted.experts
    assert parse(body(stream=True)).stream


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input_ids": None}, "a request must have one of text and input_ids, got none"),
        ({"text": "a"}, "a request must have one of text and input_ids, got both"),
        ({"input_ids": []}, r"input_ids must not be empty, got \[\]"),
        ({"input_ids": [[1], []]}, "input_ids must not be empty"),
        ({"input_ids": [1, [2]]}, "input_ids must be token ids or a list of such lists"),
        ({"input_ids": "1"}, 'input_ids must be array | null, got "1"'),
        ({"input_ids": [1, -2]}, r"input_ids\[1\] must be int >= 0, got -2"),
        ({"input_ids": [2**40]}, r"input_ids\[0\] must be int <= 2147483647, got 1099511627776"),
        ({"rid": 5}, "rid must be str | array | null, got 5"),
        ({"rid": ["a", "b"]}, "rid must have one entry per prompt, got 2 for 1 prompts"),
        ({"stream": "yes"}, 'stream must be bool | null, got "yes"'),
        ({"logprob_start_len": -2}, "logprob_start_len must be int >= -1, got -2"),
        ({"top_logprobs_num": -1}, "top_logprobs_num must be int >= 0, got -1"),
        (
            {"video_data": ["x"]},
            r"video_data must be left out, got list .*; this engine takes text and images only",
        ),
        ({"image_data": 3}, "image_data must be str"),
        (
            {"image_data": [["x"]]},
            "image_data must be an image or a list of images for each prompt, got a list in",
        ),
        (
            {"text": ["a", "b"], "input_ids": None, "image_data": ["x"]},
            "image_data must have one entry per prompt, got 1 for 2",
        ),
        ({"lora_path": ["x"]}, r"lora_path must be str \| null, got \[\"x\"\]"),
        ({"return_hidden_states": True}, "return_hidden_states must be left out"),
        ({"max_new_tokens": 4}, "max_new_tokens must be left out, got it; it is no field of /generate"),
        ({"sampling_params": 3}, "sampling_params must be object | array | null, got 3"),
        ({"sampling_params": [{}, {}]}, "sampling_params must have one entry per prompt, got 2 for 1"),
        ({"sampling_params": {"temp": 1}}, "sampling_params.temp must be left out, got it"),
        (
            {"sampling_params": {"temperature": -1}},
            "sampling_params.temperature must be float >= 0.0, got -1",
        ),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p must be float > 0.0, got 0"),
        ({"sampling_params": {"top_k": 1.5}}, "sampling_params.top_k must be int | null, got 1.5"),
        (
            {"sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens must be int >= 0, got -1",
        ),
        ({"sampling_params": {"n": 0}}, "sampling_params.n must be int >= 1, got 0"),
        ({"sampling_params": {"stop": [1]}}, r"sampling_params.stop\[0\] must be str, got 1"),
        ({"sampling_params": {"regex": "a*"}}, "sampling_params.regex must be left out"),
        (
            {"sampling_params": {"seed": 1, "sampling_seed": 2}},
            "must equal sampling_params.sampling_seed, got 1 and 2",
        ),
    ],
)
def test_a_malformed_field_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(" | ", r" \| ")):
        parse(body(**fields))


@pytest.mark.parametrize("given", [b"", b"{", b"[1]", b"null", b'"text"'])
def test_a_body_that_is_no_object_is_refused(given: bytes) -> None:
    with pytest.raises(ValueError, match="the body must be"):
        parse(given)


@pytest.mark.parametrize(
    ("fields", "images"),
    [
        ({"text": "a"}, [()]),
        ({"text": "a", "image_data": "x"}, [("x",)]),
        ({"text": "a", "image_data": ["x", "y"]}, [("x", "y")]),
        ({"text": ["a", "b"], "image_data": ["x", ["y", "z"]]}, [("x",), ("y", "z")]),
        ({"text": "a", "image_data": "x", "sampling_params": {"n": 2}}, [("x",), ("x",)]),
    ],
)
def test_each_prompt_has_its_images(fields: dict[str, object], images: list[tuple[str, ...]]) -> None:
    assert [one.images for one in parse(json.dumps(fields).encode()).each] == images
