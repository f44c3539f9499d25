"""Estimators and losses are records: a record that a test adds is validated, planned and trained without other code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import docs_algorithms
import numpy as np
import pytest
import torch
import transformers
from train_data_cases import border as make_data_border
from train_data_cases import four
from trainer_cases import hf_log_probs, make_config, make_samples, rank_data

from slime import operators
from slime.algo.advantage import compute_advantages
from slime.algo.estimators import ESTIMATORS, Estimator, Response, same_for_all_tokens
from slime.algo.losses import LOSSES, Loss
from slime.algo.needs import needs_old_log_probs
from slime.algo.policy_loss import policy_loss
from slime.algo.surrogates import CLIPPED, SURROGATES, Surrogate
from slime.algo.token_columns import TokenColumns
from slime.config.schema import Config
from slime.data.columns import COLUMNS, Column
from slime.data.train_data import post_process_rewards
from slime.roles import CRITIC, POLICY, REFERENCE, get_roles
from slime.rules.algorithm import check_algorithm, check_group_size

NEW = "margin_weighted"


def weighted(c: Config, t: TokenColumns, log_probs: torch.Tensor, ppo_kl: torch.Tensor) -> tuple:
    """Computes -margin A log p, with a margin per token from the engine."""
    return -t["margin"] * t["advantages"] * log_probs, torch.zeros_like(log_probs)


def half_reward(c: Config, response: Response) -> tuple[torch.Tensor, torch.Tensor]:
    return same_for_all_tokens(c, replace(response, reward=response.reward / 2))


def small_clip(c: Any) -> None:
    if c.algorithm.eps_clip > 0.5:
        raise ValueError(
            f"--eps-clip must be at most 0.5 with --advantage-estimator {NEW}, got {c.algorithm.eps_clip}"
        )


@pytest.fixture
def record(monkeypatch) -> Estimator:
    """Adds a new estimator and a new column of the engine: one entry in each table is enough."""
    new = Estimator(
        NEW,
        "`A_t = r / 2`",
        Surrogate("margin", "log-prob times margin", weighted),
        half_reward,
        group="mean",
        checks=(small_clip,),
    )
    monkeypatch.setitem(ESTIMATORS, NEW, new)
    monkeypatch.setitem(
        COLUMNS,
        "margin",
        Column("margin", "response", "sample", np.float32, optional=True, carried="training", mean=True),
    )
    return new


def test_a_new_estimator_is_trained_with_a_new_column(root, build, record):
    """The loss of a step equals the loss by hand from transformers' log-probs, and its gradient moves the weights."""
    samples = make_samples()
    for sample in samples:
        sample.columns["margin"] = [1 + 0.1 * i for i in range(sample.response_length)]
    trainer = build(advantage_estimator=NEW)
    assert trainer.trainings[-1].head.kind is operators.ONE_PASS
    data = rank_data(trainer.config, samples)
    rewards = dict(zip(data["sample_indices"], data["rewards"], strict=True))
    result = trainer.train(0, data)
    policy = transformers.AutoModelForCausalLM.from_pretrained(root / "policy")
    siblings = sum(sum(s.loss_mask) for s in samples[-2:])
    loss, margins = 0.0, 0.0
    for s in samples:
        with torch.no_grad():
            log_probs, _ = hf_log_probs(policy, s, 1.0)
        mask = torch.tensor(s.loss_mask) * (not s.remove_sample)
        weight = mask / (siblings if s.rollout_id else max(int(mask.sum()), 1)) / 8
        margin = torch.tensor(s.columns["margin"])
        loss += float((-margin * rewards[s.index] / 2 * log_probs * weight).sum())
        margins += float((margin * mask).sum() / max(int(mask.sum()), 1)) / len(samples)
    assert abs(loss) > 0.01
    step = result.steps[0]
    assert step["train/loss"] == step["train/pg_loss"] == pytest.approx(loss, abs=1e-5)
    assert step["train/grad_norm"] > 0 and step["train/pg_clipfrac"] == 0
    assert result.rollout["rollout/margin"] == pytest.approx(margins, abs=1e-5)


def test_everything_else_reads_the_record(root, record, monkeypatch):
    config = make_config(root, advantage_estimator=NEW)
    check_algorithm(config)
    assert "group_advantage" in operators.called(config) and "grpo_loss" not in operators.called(config)
    assert operators.loss_head(config) == (operators.ONE_PASS, "")
    assert get_roles(config) == (POLICY,)
    one = make_config(root, advantage_estimator=NEW, global_batch_size=4, n_samples_per_prompt=1)
    with pytest.raises(ValueError, match=f"must be above 1 with --advantage-estimator {NEW}, got 1"):
        check_group_size(one)
    with pytest.raises(ValueError, match=f"at most 0.5 with --advantage-estimator {NEW}, got 0.7"):
        check_algorithm(make_config(root, advantage_estimator=NEW, eps_clip=0.7))
    border = make_data_border(advantage_estimator=NEW)
    assert post_process_rewards(*border, four())[1] == [
        0.5,
        -0.5,
        -1.0,
        1.0,
    ]  # they are centred, but not divided
    assert f"| `{NEW}` | `A_t = r / 2` | `margin` |" in docs_algorithms.page()

    reads = frozenset({"ref_log_probs", "old_log_probs"})
    by_sequence = replace(record.surrogate, ratio="sequence")
    changed = replace(record, surrogate=by_sequence, reads=reads, group="none")
    monkeypatch.setitem(ESTIMATORS, NEW, changed)
    once = make_config(root, advantage_estimator=NEW, num_steps_per_rollout=1)
    assert operators.loss_head(once)[1] == f"--advantage-estimator {NEW} looks at whole sequences"
    assert needs_old_log_probs(once) and get_roles(once) == (REFERENCE, POLICY)
    assert "group_advantage" not in operators.called(once)
    check_group_size(one)
    assert post_process_rewards(*border, four())[1] == [1.0, 0.0, 3.0, 5.0]
    monkeypatch.setitem(ESTIMATORS, NEW, replace(record, reads=frozenset({"values"})))
    assert get_roles(config) == (CRITIC, POLICY)


def test_an_estimator_may_read_siblings_and_values(build, record, monkeypatch):
    """The record names its columns: the rewards of the group come with the data, and values need a critic."""

    def above_all(c: Config, response: Response) -> tuple[torch.Tensor, torch.Tensor]:
        best = response.columns["group_rewards"].max()
        advantages = response.reward - best - response.columns["values"]
        return advantages, response.columns["values"] + 1

    reads = frozenset({"group_rewards", "values"})
    monkeypatch.setitem(
        ESTIMATORS, NEW, replace(ESTIMATORS["grpo"], name=NEW, group="none", estimate=above_all, reads=reads)
    )
    trainer = build(advantage_estimator=NEW)
    data = rank_data(trainer.config, make_samples())
    result = trainer.train(0, data)
    assert result.steps[0]["train/critic-value_loss"] == pytest.approx(
        7 / 8
    )  # one rollout in 8 has no trained token
    rewards: dict[int | None, dict[Any, list[float]]] = {}
    for s in make_samples():
        rewards.setdefault(s.group_index, {}).setdefault(s.rollout_id or s.index, []).append(s.reward)
    for i, index in enumerate(data["sample_indices"]):
        sample = make_samples()[index]
        best = max(sum(of) / len(of) for of in rewards[sample.group_index].values())
        assert data["advantages"][i].tolist() == pytest.approx(
            [sample.reward - best] * sample.response_length
        )


def test_a_column_that_the_run_does_not_have_is_named(record):
    t = TokenColumns(
        torch.zeros(1),
        torch.zeros(1),
        {name: torch.ones(1) for name in ("loss_masks", "loss_denominators", "advantages")},
        torch.zeros(1, dtype=torch.int64),
        [2],
        [1],
        1.0,
    )
    with pytest.raises(ValueError, match="the loss must have the column margin, got advantages, loss_denom"):
        policy_loss(Config.from_flat({"advantage_estimator": NEW}), t)


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match="--advantage-estimator must be one of grpo, .*, ppo, got grop"):
        compute_advantages(Config.from_flat({"advantage_estimator": "grop"}), [])


def test_a_new_loss_is_a_record(root, build, monkeypatch):
    def twice(c: Config, t: TokenColumns) -> tuple:
        loss = -2 * t.mean(t.log_probs)
        return loss, {"loss": loss.detach()}, {}

    sft = build(loss_type="sft_loss")
    once = sft.train(0, rank_data(sft.config, make_samples())).steps[0]["train/loss"]
    monkeypatch.setitem(LOSSES, "twice", Loss("twice", twice, rewarded=False))
    new = build(loss_type="twice")
    assert new.train(0, rank_data(new.config, make_samples())).steps[0]["train/loss"] == pytest.approx(
        2 * once
    )
    assert "grpo_loss" not in operators.called(new.config)


def test_records_agree_with_themselves():
    for name, record in ESTIMATORS.items():
        assert record.name == name and SURROGATES[record.surrogate.name] is record.surrogate
        assert record.source
    for name, surrogate in SURROGATES.items():
        assert surrogate.name == name and surrogate.source
    for record in (*ESTIMATORS.values(), *SURROGATES.values()):
        assert docs_algorithms.hand_test_of(record), (
            f"{record.name} must have a test by hand, named in HAND_TESTS"
        )
    of_sequences = {name for name, surrogate in SURROGATES.items() if surrogate.reads_sequences}
    assert of_sequences == {"gspo", "gspo_token", "gmpo"}
    assert ESTIMATORS["grpo"].surrogate is CLIPPED
    assert {name: loss.name for name, loss in LOSSES.items()} == {name: name for name in LOSSES}
    assert [loss.objective is None for loss in LOSSES.values()] == [False, False, False, False, True]
