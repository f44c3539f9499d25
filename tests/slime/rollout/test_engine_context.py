"""Tests the room that the engine's context leaves for a response. The engine is a double."""

from __future__ import annotations

import asyncio

import pytest
from rollout_double import make_args, make_state, make_tokenizer

from slime.config.sections.engine import EngineFacts
from slime.rollout.generate import generate, generate_and_rm
from slime.rollout.state import rollout_sampling_params as params_of
from slime.types import Sample

STATUS = Sample.Status


def run(args, sample, fn=generate):
    return asyncio.run(fn(args, sample, params_of(args)))


async def length_reward(args, sample):
    return float(sample.response_length)


def of_context(tmp_path, tokens, **flags):
    (tmp_path / "config.json").write_text(f'{{"max_position_embeddings": {tokens}}}')
    args = make_args(hf_checkpoint=str(tmp_path), custom_rm_path="test_engine_context.length_reward", **flags)
    return args, make_state(args)


def test_a_response_ends_where_the_engines_context_is_full(tmp_path):
    args, state = of_context(tmp_path, 11)
    sample = run(args, Sample(prompt="q len=5 :"))  # 9 tokens
    assert (sample.response, sample.status) == ("ab", STATUS.TRUNCATED)
    assert state.engine.calls[0][1]["max_new_tokens"] == 2
    # The context is full, so there is no request.
    assert run(args, sample) is sample and len(state.engine.calls) == 1
    with pytest.raises(
        ValueError, match=r"max_position_embeddings must leave room .* got 11 for 11 prompt tokens"
    ):
        run(args, Sample(prompt="q" * 11))
    args, state = of_context(tmp_path, 99, rollout_max_context_len=10)
    assert run(args, Sample(prompt="q len=5 :")).response == "a"
    args, state = of_context(tmp_path, 10, rollout_max_context_len=99)
    assert run(args, Sample(prompt="q len=5 :")).response == "a"


def test_the_flag_of_the_engine_counts_before_the_models_config(tmp_path):
    args, _ = of_context(tmp_path, 99)
    args.engine_facts = EngineFacts(context=10, flag_of={"context": "--vllm-max-model-len"})
    make_state(args)
    assert run(args, Sample(prompt="q len=5 :")).response == "a"
    with pytest.raises(
        ValueError, match="--vllm-max-model-len must leave room for a response, got 10 for 10 prompt"
    ):
        run(args, Sample(prompt="q" * 10))


def test_a_request_never_asks_for_more_than_is_left(tmp_path):
    """An engine rejects a request with more min_new_tokens than max_new_tokens."""
    args, state = of_context(tmp_path, 99, rollout_max_response_len=6)
    params = {**params_of(args), "min_new_tokens": 4}
    asked = []
    for done, prompt in ((0, "q"), (3, "q"), (5, "q"), (0, "q" * 97)):
        ids = state.tokenizer.encode(prompt + "b" * done)
        sample = Sample(
            prompt=prompt, tokens=ids, response="b" * done, response_length=done, loss_mask=[1] * done
        )
        sample.rollout_log_probs = [-1.0] * done
        asyncio.run(generate(args, sample, params))
        asked.append([state.engine.calls[-1][1][name] for name in ("min_new_tokens", "max_new_tokens")])
    assert asked == [[4, 6], [1, 3], [0, 1], [2, 2]]


@pytest.mark.parametrize(
    "limit", ["rollout_max_response_len", "rollout_max_context_len", "the engine's context"]
)
def test_masked_samples_without_room_are_truncated_and_not_trained(tmp_path, limit):
    """A resumed run may have a shorter limit. Such a sample gets no trained token, and the run continues."""
    shorter = {"rollout_max_response_len": 2, "rollout_max_context_len": 4}
    flags = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    args, state = of_context(tmp_path, 4 if limit not in shorter else 99, **flags)
    if limit in shorter:
        setattr(args, limit, shorter[limit])
    tokens = make_tokenizer().encode("q:ab")
    sample = Sample(
        prompt="q:", tokens=tokens, response="ab", response_length=2, rollout_log_probs=[-0.5, -0.6]
    )
    sample.status = STATUS.ABORTED
    run(args, sample, generate_and_rm)
    assert (sample.status, sample.loss_mask, sample.remove_sample) == (STATUS.TRUNCATED, [0, 0], True)
    assert sample.reward == 2.0 and not state.engine.calls
    sample.check()
