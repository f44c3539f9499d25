"""Tests one sample: seeds, budgets, continuation, status, hooks and rewards. The engine is a double."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import math
import threading
from dataclasses import dataclass

import pytest
from rollout_double import make_args, make_state, make_tokenizer

from slime.protocols import GenerateResult
from slime.rollout import sample_hooks
from slime.rollout.generate import generate, generate_and_rm, generate_and_rm_group
from slime.rollout.rewards import finite
from slime.rollout.state import request_seed
from slime.rollout.state import rollout_sampling_params as params_of
from slime.types import Sample

STATUS = Sample.Status


def run(args, sample, fn=generate, **kwargs):
    return asyncio.run(fn(args, sample, params_of(args), **kwargs))


def setup(**flags):
    args = make_args(custom_rm_path="test_rollout_generate.length_reward", **flags)
    return args, make_state(args)


async def length_reward(args, sample):
    if isinstance(sample, list):
        return [float(s.response_length) for s in sample]
    return float(sample.response_length)


def test_seed_is_the_documented_hash():
    digest = hashlib.sha256(b"42/rollout/3/7/0").hexdigest()
    assert request_seed(42, "rollout/3/7", 0) == int(digest[:13], 16)  # 13 hex digits are 52 bits
    seeds = {
        request_seed(run_seed, f"{stream}/{rollout}/{index}", done)
        for run_seed in range(3)
        for stream in ("rollout", "eval/a")
        for rollout in range(5)
        for index in range(20)
        for done in range(3)
    }
    assert len(seeds) == 3 * 2 * 5 * 20 * 3 and max(seeds) < 2**52


def test_a_finished_response_fills_the_sample():
    args, state = setup()
    state.engine.version = 4
    sample = run(args, Sample(prompt="q: len=2 :", index=7, session_id="rollout/3/7"))
    assert make_tokenizer().decode(sample.tokens) == "q: len=2 :ab<|im_end|>"
    assert (sample.response, sample.response_length) == ("ab<|im_end|>", 3)
    assert sample.rollout_log_probs == pytest.approx([-0.1, -0.2, -0.3])
    assert sample.loss_mask == [1, 1, 1] and sample.weight_versions == [4]
    assert sample.status is STATUS.COMPLETED
    assert sample.prefix_cache_info.to_dict() == {"cached_tokens": 5, "total_prompt_tokens": 10}
    ((text, params, seed),) = state.engine.calls
    assert (text, seed) == ("q: len=2 :", request_seed(42, "rollout/3/7", 0))
    assert params["max_new_tokens"] == 8 and params["temperature"] == 1.0 and params["top_k"] == -1
    sample.check()


def test_messages_are_rendered_for_the_engine():
    args, state = setup()
    run(args, Sample(prompt=[{"role": "user", "content": "hi"}]))
    assert state.engine.calls[0][0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_token_budget_counts_what_is_there():
    args, state = setup(rollout_max_response_len=2)
    sample = run(args, Sample(prompt="q len=5 :"))
    assert (sample.response, sample.status) == ("ab", STATUS.TRUNCATED)
    # Nothing is left, so there is no request.
    assert run(args, sample) is sample and len(state.engine.calls) == 1

    args, state = setup(rollout_max_response_len=100, rollout_max_context_len=12)
    assert run(args, Sample(prompt="q len=5 :")).response == "abc"  # 9 prompt tokens leave 3
    with pytest.raises(
        ValueError, match=r"--rollout-max-context-len must leave room .* got 12 for 12 prompt tokens"
    ):
        run(args, Sample(prompt="q" * 12, index=5, group_index=1))
    args, state = setup(rollout_max_response_len=None)
    with pytest.raises(ValueError, match="--rollout-max-response-len must be set"):
        run(args, Sample(prompt="q"))


def test_an_aborted_response_goes_on_where_it_stopped():
    args, state = setup(partial_rollout=True)

    async def cut(sample):
        task = asyncio.create_task(generate(args, sample, params_of(args)))
        await asyncio.sleep(0.01)
        await state.engine.abort_all()
        await task

    sample = Sample(prompt="slow len=4 :", session_id="rollout/0/0")
    asyncio.run(cut(sample))
    assert (sample.response, sample.status, sample.weight_versions) == ("ab", STATUS.ABORTED, [0])
    state.engine.version = 1
    run(args, sample)
    assert (sample.response, sample.status, sample.weight_versions) == (
        "abcd<|im_end|>",
        STATUS.COMPLETED,
        [0, 1],
    )
    assert sample.rollout_log_probs == pytest.approx([-0.1, -0.2, -0.1, -0.2, -0.3])
    assert sample.loss_mask == [1] * 5
    first, second = state.engine.calls
    assert (first[1]["max_new_tokens"], second[1]["max_new_tokens"]) == (8, 6)
    assert (first[2], second[2]) == (request_seed(42, "rollout/0/0", 0), request_seed(42, "rollout/0/0", 2))
    assert sample.prefix_cache_info.to_dict() == {"cached_tokens": 6 + 7, "total_prompt_tokens": 12 + 14}


def test_a_character_split_between_requests_is_decoded_whole():
    tokenizer = make_tokenizer()
    args = make_args()
    state = make_state(args, tokenizer)
    first, second = tokenizer.encode("é")

    async def halves(token_ids, params, *, seed, deadline_s, columns):
        token = second if token_ids[-1] == first else first
        return GenerateResult([token], [-1.0], "\ufffd", "abort" if token == first else "stop", [0])

    state.engine.generate = halves
    sample = Sample(prompt="q")
    asyncio.run(generate(args, sample, params_of(args)))
    assert sample.response == "\ufffd"
    assert asyncio.run(generate(args, sample, params_of(args))).response == "é"


def test_offpolicy_tokens_can_be_masked():
    args, _ = setup(partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    sample = Sample(prompt="slow len=4 :", tokens=make_tokenizer().encode("slow len=4 :ab"), response="ab")
    sample.response_length, sample.rollout_log_probs, sample.status = 2, [-0.5, -0.6], STATUS.ABORTED
    run(args, sample, generate_and_rm)
    assert sample.loss_mask == [0, 0, 1, 1, 1] and not sample.remove_sample
    assert sample.reward == 5.0
    # A sample that finished under older weights counts in its group but is not trained on.
    run(args, sample, generate_and_rm)
    assert sample.loss_mask == [0] * 5 and sample.remove_sample
    sample.check()


@pytest.mark.parametrize(
    ("prompt", "why"), [("late", "connection refused"), ("stuck", "the engine did not answer")]
)
def test_a_missed_deadline_aborts_the_sample(prompt, why):
    args, state = setup(rollout_deadline_s=0.05)
    sample = run(args, Sample(prompt=prompt, index=3), generate_and_rm)
    assert sample.status is STATUS.ABORTED and sample.reward is None and sample.response_length == 0
    stream = f"sample/0/{sample.index}"
    assert list(state.timed_out) == [stream] and why in state.timed_out[stream]


def test_a_refused_prompt_names_the_sample():
    args, _ = setup()
    with pytest.raises(ValueError, match="sample 3 of group 1: the engine refused the prompt"):
        run(args, Sample(prompt="refuse", index=3, group_index=1))


def test_finished_and_scored_samples_are_left_alone():
    args, state = setup()
    sample = Sample(prompt="q", response="done", response_length=4, status=STATUS.COMPLETED, reward=0.25)
    assert run(args, sample, generate_and_rm).reward == 0.25 and state.engine.calls == []


def test_group_names_its_random_streams_and_shares_nothing():
    args, state = setup()
    group = [Sample(prompt="q len=2 :", index=i, group_index=0) for i in (4, 5)]
    done = run(args, group, generate_and_rm_group, rollout_id=9)
    assert done == group and [s.session_id for s in group] == ["rollout/4", "rollout/5"]
    assert [s.reward for s in group] == [3.0, 3.0]
    assert {seed for _, _, seed in state.engine.calls} == {
        request_seed(42, f"rollout/{i}", 0) for i in (4, 5)
    }
    again = [Sample(prompt="q len=2 :", index=4)]
    run(args, again, generate_and_rm_group, rollout_id=0, stream="eval/a", evaluation=True)
    assert state.engine.calls[-1][2] == request_seed(42, "eval/a/4", 0)


def test_concurrency_is_bounded():
    args, state = setup(server_concurrency=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    assert state.concurrency == 4  # 2 engines
    group = [Sample(prompt="q len=2 :", index=i) for i in range(12)]
    run(args, group, generate_and_rm_group)
    assert state.engine.most_running == 4


async def two_turns(args, sample, sampling_params, evaluation=False):
    sample.metadata["evaluation"] = evaluation
    sample = await generate(args, sample, {**sampling_params, "max_new_tokens": 2})
    sample.append_response_tokens(tokens=[1, 2, 3], trainable=False, text="xyz")
    return sample


def plain_function(args, sample, sampling_params):
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], text="p")
    sample.status = STATUS.COMPLETED
    return sample


async def fan_out(args, sample, sampling_params):
    siblings = [copy.deepcopy(sample) for _ in range(2)]
    return [await generate(args, sibling, sampling_params) for sibling in siblings]


async def broken(args, sample, sampling_params):
    raise KeyError("tool")


async def nothing(args, sample, sampling_params):
    return []


def custom(name, **flags):
    return setup(custom_generate_function_path=f"test_rollout_generate.{name}", **flags)


def test_custom_generate_functions():
    args, _ = custom("two_turns")
    sample = run(args, Sample(prompt="q len=5 :"), generate_and_rm, evaluation=True)
    assert sample.loss_mask == [1, 1, 0, 0, 0] and sample.metadata == {"evaluation": True}
    assert sample.rollout_log_probs == pytest.approx([-0.1, -0.2, 0, 0, 0]) and sample.reward == 5.0
    args, _ = custom("plain_function")
    assert run(args, Sample(prompt="q"), generate_and_rm).reward == 1.0
    args, _ = custom("two_turns")
    sample = Sample(prompt="q", generate_function_path="test_rollout_generate.plain_function")
    assert run(args, sample, generate_and_rm).response == "p"  # the sample's own function goes first


def test_fan_out_shares_a_rollout_id_and_is_scored_together():
    args, _ = custom("fan_out")
    group = run(args, [Sample(prompt="q :", index=i) for i in (6, 7)], generate_and_rm_group)
    assert [(s.index, s.rollout_id) for s in group] == [(6, 6), (6, 6), (7, 7), (7, 7)]
    assert [s.reward for s in group] == [4.0] * 4


def test_errors_of_users_name_function_and_sample():
    args, _ = custom("broken")
    with pytest.raises(
        RuntimeError,
        match=r"--custom-generate-function-path test_rollout_generate.broken failed on sample 3 of group 1: KeyError",
    ):
        run(args, [Sample(prompt="q", index=3, group_index=1)], generate_and_rm_group)
    args, _ = custom("nothing")
    with pytest.raises(RuntimeError, match=r"failed on sample 3 .*must return samples, got \[\]"):
        run(args, Sample(prompt="q", index=3), generate_and_rm)


async def group_reward(args, samples):
    return [s.response_length / sum(x.response_length for x in samples) for s in samples]


def test_group_reward_sees_the_whole_group():
    args, _ = setup(group_rm=True)
    args.custom_rm_path = "test_rollout_generate.group_reward"
    group = [Sample(prompt=f"q len={n} :", index=n) for n in (1, 5)]
    assert run(args, Sample(prompt="q"), generate_and_rm).reward is None
    assert [s.reward for s in run(args, group, generate_and_rm_group)] == [0.25, 0.75]  # 2 and 6 tokens
    args.rollout_deadline_s = 0.05
    group = [Sample(prompt="q"), Sample(prompt="late")]
    assert [s.reward for s in run(args, group, generate_and_rm_group)] == [None, None]  # cut off: not scored


async def nan_of_one(args, sample):
    """A judge that has no reward for the sample with index 1."""
    if isinstance(sample, list):
        return [await nan_of_one(args, one) for one in sample]
    value = float("nan") if sample.index == 1 else 1.0
    return value if args.reward_key is None else {args.reward_key: value, "why": "judged"}


@pytest.mark.parametrize("flags", [{}, {"group_rm": True}, {"reward_key": "score"}])
def test_a_reward_that_is_not_finite_removes_its_sample_alone(flags):
    args, _ = setup(**flags)
    args.custom_rm_path = "test_rollout_generate.nan_of_one"
    group = run(args, [Sample(prompt="q :", index=i) for i in range(3)], generate_and_rm_group)
    assert [s.reward_value(args.reward_key) for s in group] == [1.0, 0.0, 1.0]
    assert [s.remove_sample for s in group] == [False, True, False]
    record = {"reason": "reward", "said": "a reward must be finite, got nan; mend the reward"}
    assert [s.metadata.get("removed") for s in group] == [None, record, None]
    assert flags != {"reward_key": "score"} or group[1].reward["why"] == "judged"
    assert finite.figures(group) == {"removed/reward": 1.0} and finite.figures(group[:1]) == {}


def test_the_first_reward_that_is_not_finite_is_a_warning(caplog):
    for value in (1.0, None, math.inf, math.nan):
        sample = Sample(prompt="q", index=5, group_index=2, label="7", response="so 7", reward=value)
        finite.remove_unless_finite([sample], None)
    (line,) = caplog.messages
    assert line.startswith(
        "a reward must be finite, got inf for sample 5 of group 2, label '7', response 'so 7'"
    )


def mark(args, sample, *, rollout_id, evaluation):
    sample.metadata["seen"] = [rollout_id, evaluation]


async def replace(args, sample):
    return Sample(prompt=sample.prompt, response="replaced", response_length=9, metadata=sample.metadata)


def wrong(args, sample):
    return 3


@dataclass
class Marker:
    """A plain dataclass, which compares by its fields and so has no hash."""

    mark: str

    def __call__(self, args, sample, *, rollout_id):
        sample.metadata[self.mark] = rollout_id


marker = Marker("marked")


def test_a_hook_may_be_an_object_without_a_hash_and_a_function_is_looked_at_once():
    with pytest.raises(TypeError, match="unhashable"):
        hash(marker)
    paths = ["test_rollout_generate.marker", "test_rollout_generate.mark"]
    args, _ = setup(rollout_sample_hook_path=paths)
    run(args, Sample(prompt="q"), generate_and_rm, rollout_id=5)
    before = sample_hooks._remembered.cache_info()
    sample = run(args, Sample(prompt="q"), generate_and_rm, rollout_id=6)
    after = sample_hooks._remembered.cache_info()
    assert (sample.metadata["marked"], sample.metadata["seen"]) == (6, [6, False])
    assert after.misses == before.misses and after.hits > before.hits


def test_sample_hooks_run_before_the_reward():
    args, _ = setup(rollout_sample_hook_path=["test_rollout_generate.mark", "test_rollout_generate.replace"])
    sample = run(args, Sample(prompt="q"), generate_and_rm, rollout_id=5)
    assert (sample.response, sample.reward, sample.metadata["seen"]) == ("replaced", 9.0, [5, False])
    args, _ = setup(rollout_sample_hook_path=["test_rollout_generate.wrong"])
    with pytest.raises(
        RuntimeError,
        match="--rollout-sample-hook-path must return a sample, got int from .*; return the expected",
    ):
        run(args, Sample(prompt="q"), generate_and_rm)


def test_state_runs_in_one_loop_from_any_thread():
    _, state = setup()

    async def loop_and_thread():
        return asyncio.get_running_loop(), threading.current_thread()

    first = state.run(loop_and_thread())
    assert state.run(loop_and_thread()) == first and first[1] is not threading.current_thread()
    assert asyncio.run(asyncio.to_thread(state.run, loop_and_thread())) == first
    with pytest.raises(ZeroDivisionError):
        state.run(_divide())
    state.begin()
    with pytest.raises(RuntimeError, match="rollouts must take turns"):
        state.begin()
    state.end()
    state.close()
    assert state.engine.closed


async def _divide():
    return 1 / 0


def test_a_sample_that_starts_again_draws_another_response():
    args, state = setup()
    sample = Sample(prompt="q: len=2 :", index=7, session_id="rollout/3/7")
    for _ in range(2):
        sample.tokens, sample.response, sample.response_length = [], "", 0
        run(args, sample)
    assert sample.response == "ab<|im_end|>" and sample.rollout_log_probs == pytest.approx([-0.1, -0.2, -0.3])
    seeds = [seed for _, _, seed in state.engine.calls]
    assert seeds == [request_seed(42, "rollout/3/7", 0), request_seed(42, "rollout/3/7", 0, retry=1)]
    assert seeds[0] != seeds[1]
