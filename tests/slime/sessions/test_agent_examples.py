"""Tests the hooks of examples/calculator-tool and examples/multi-agent, with an engine that has scripted answers.
Their whole runs are in tests/e2e/examples."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from typing import Any

import calculator
import pytest
import solver_critic
from rollout_double import ListSource, make_args, make_state
from session_double import CALL, END, QwenParser, Scripted
from train_data_cases import border

from slime.config.hook_calls import Hooks
from slime.data.train_data import convert_samples_to_train_data
from slime.rollout.vllm_rollout import generate_rollout
from slime.types import Sample

CALCULATION = '<tool_call>{"name": "calc", "arguments": {"sum": "12+34"}}</tool_call>' + END
HOSTILE = (
    "9**9**9",
    "(" * 10_000,
    "9" * 10_000,
    "-" * 10_000 + "1",
    "__import__('os').system('true')",
    "().__class__",
    "'a'*9999999",
    "[1]*9999999",
    "1<<99999999",
    "1/0",
    "1e999",
    "1j",
    "True",
    "a:=1",
    "lambda: 1",
    "\0",
    "",
)


def test_the_calculator_computes_whole_numbers_and_nothing_else() -> None:
    values = {"12+34": 46, " 2*(3-5) ": -4, "-7*-1": 7, "9*" * 19 + "99": 9**19 * 99}
    assert {text: calculator.calculate(text) for text in values} == values
    began = time.process_time()
    for text in HOSTILE:
        with pytest.raises(ValueError):
            calculator.calculate(text)
    assert time.process_time() - began < 1


def parser(args: Any, tokenizer: Any) -> QwenParser:
    return QwenParser()


def asked(script: Any) -> Sample:
    """Returns the sample of the question 12+34=, with an engine that answers by `script`."""
    args = make_args(rollout_max_response_len=200)
    engine = Scripted(script)
    state = make_state(args, engine.tokenizer, chat_parser_path="test_agent_examples.parser")
    state.engine = engine
    given = Sample(prompt="12+34=", label="46", index=3, session_id="rollout/3")

    async def run() -> Sample:
        (made,) = await calculator.generate(args, given, state.sampling_params)
        (made.reward,) = await calculator.score(args, [made])
        return made

    try:
        return state.run(run())
    finally:
        state.close()


def test_what_the_calculator_says_is_not_trained_on() -> None:
    made = asked(lambda prompt: "46" + END if "<tool_response>46" in prompt else CALCULATION)
    made.check()
    assert made.reward == 1 and made.metadata["session"]["tool_calls"] == 1
    assert made.loss_mask is not None and made.rollout_log_probs is not None
    wrote = len(CALCULATION) - len(END) + 1, len("46") + 1
    assert sum(made.loss_mask) == sum(wrote) and made.loss_mask[: wrote[0]] == [1] * wrote[0]
    assert made.loss_mask[-wrote[1] :] == [1] * wrote[1] and "46" in made.response
    assert all(
        (value == 0) == (not on) for value, on in zip(made.rollout_log_probs, made.loss_mask, strict=True)
    )


def test_a_wrong_call_is_an_answer_and_a_model_that_only_calls_gets_nothing() -> None:
    made = asked(lambda prompt: CALL + END)
    assert made.response.count("error: call calc with a text named sum") == calculator.TURNS - 1
    assert made.reward == 0 and made.status is Sample.Status.COMPLETED and not made.remove_sample


def test_a_tool_that_hangs_ends_its_sample_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(name: str, arguments: str) -> str:
        await asyncio.sleep(60)
        return ""

    monkeypatch.setattr(calculator, "use_tool", hang)
    monkeypatch.setattr(calculator, "TOOL_S", 0.05)
    made = asked(lambda prompt: CALCULATION)
    record = made.metadata["session"]
    assert (record["ended"], record["said"]) == ("tool", "the calculator took more than 0.05 s")
    assert made.status is Sample.Status.FAILED and made.remove_sample and made.reward == 0


def fanned_out(path: str, **flags: Any) -> list[Sample]:
    """Returns the samples of a rollout with two prompts and two samples each, from a custom generate function."""
    args = make_args(custom_generate_function_path=path, rollout_max_response_len=40, **flags)
    make_state(args)
    groups = generate_rollout(args, 0, ListSource(args, ["q: len=2 :", "r: len=3 :"])).samples
    return [sample for group in groups for sample in group]


def test_two_roles_are_siblings_and_each_is_compared_with_its_own_kind() -> None:
    made = fanned_out("solver_critic.generate", custom_rm_path="solver_critic.score_untrained")
    assert [s.metadata["role"] for s in made] == ["solver", "critic"] * 4
    for solver, critic in zip(made[::2], made[1::2], strict=True):
        solver.check()
        critic.check()
        assert solver.rollout_id == critic.rollout_id == solver.index
        assert critic.prompt[1:] == [
            {"role": "assistant", "content": solver.response.removesuffix(END)},
            {"role": "user", "content": solver_critic.QUESTION},
        ]
    for sample, reward in zip(made, [0.9, 0.2, 1.0, 0.1, 0.0, 0.0, 0.0, 1.0], strict=True):
        sample.reward = reward
    raw, advantages = solver_critic.advantages(None, made)
    assert raw == [0.9, 0.2, 1.0, 0.1, 0.0, 0.0, 0.0, 1.0]
    half = 0.5**0.5
    assert advantages == pytest.approx([-half, half, half, -half, 0, -half, 0, half], abs=1e-4)
    data = convert_samples_to_train_data(*border(), made)
    assert data["rollout_ids"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data["rollout_mask_sums"][0] == made[0].response_length + made[1].response_length


def test_rewards_of_the_roles() -> None:
    said = {"46": ("yes", "no"), "47": ("No, it is 46", "yes")}
    for answer, (fitting, other) in said.items():
        for judgement, reward in ((fitting, 1.0), (other, 0.0)):
            pair = [
                Sample(response=answer, label="46", metadata={"role": "solver"}),
                Sample(response=judgement, label="46", metadata={"role": "critic"}),
            ]
            assert asyncio.run(solver_critic.score(None, pair)) == [float(answer == "46"), reward]


async def three_agents(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Returns samples as slime's example of several agents does: copies in any order, with separate tokens, status
    and rewards, and without log-probs, loss mask and weight versions."""
    args = copy.deepcopy(args)
    made = []
    for number in range(3):
        one = copy.deepcopy(sample)
        one.tokens, one.response, one.response_length = [1, 2, *range(number + 1)], "x", number + 1
        one.status, one.reward, one.rollout_id = Sample.Status.COMPLETED, 0.8 * number, sample.index
        made.append(one)
    random.shuffle(made)
    return made


def test_samples_without_log_probs_train_where_nothing_reads_these(caplog: pytest.LogCaptureFixture) -> None:
    made = fanned_out("test_agent_examples.three_agents")
    assert len(made) == 12 and all(s.rollout_log_probs is None for s in made)
    data = convert_samples_to_train_data(*border(), made)
    assert "rollout_log_probs" not in data and data["rollout_mask_sums"] == [6.0] * 12
    assert data["loss_masks"] == [[1] * s.response_length for s in made]
    assert "fills no rollout_log_probs" in caplog.text
    for flag in ("use_tis", "max_staleness", "get_mismatch_metrics"):
        config = border()[0].with_values(**{flag: 1})
        with pytest.raises(
            ValueError, match="rollout_log_probs must .* got none .*; take them from the engine"
        ):
            convert_samples_to_train_data(config, Hooks(config), made)
    made[0].rollout_log_probs = [-1.0] * made[0].response_length
    with pytest.raises(
        ValueError, match="rollout_log_probs must have one entry per response token, got none"
    ):
        convert_samples_to_train_data(*border(), made)
