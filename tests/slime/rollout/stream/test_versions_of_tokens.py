"""Tests each token's version: over partial rollouts and sessions, in saved rollouts, in staleness, and in the loss."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_double import make_args, make_state
from train_data_cases import border

from slime.algo.policy_loss import policy_loss
from slime.algo.token_columns import TokenColumns
from slime.data import columns
from slime.data.columns import token_versions
from slime.data.packing import pack
from slime.data.train_data import make_rank_data
from slime.protocols import UNKNOWN_VERSION, VERSIONS, GenerateResult
from slime.rollout.debug_data import load_debug_rollout_data, save_debug_rollout_data
from slime.rollout.generate import generate
from slime.rollout.stream import ages
from slime.rollout.stream.groups import StreamGroup
from slime.sessions.turns import Turn, TurnTree
from slime.types import Sample

HF = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
}


def versions(*of_tokens: int) -> dict[str, tuple[np.ndarray, ...]]:
    return {VERSIONS: (np.array(of_tokens, np.int32),)}


ANSWER = GenerateResult([5, 6, 7], [-0.1, -0.2, -0.3], "abc", "stop", [3, 4], columns=versions(3, 3, 4))


def mixed(index: int = 0, reward: float = 0.0, **fields: object) -> Sample:
    """Returns a sample with two tokens of version 0, two of a tool, three of version 1."""
    sample = Sample(index=index, group_index=0, tokens=[9], reward=reward, weight_versions=[0, 1], **fields)
    for version, count in ((0, 2), (None, 2), (1, 3)):
        if version is None:
            sample.append_response_tokens(tokens=[1] * count, trainable=False)
        else:
            result = GenerateResult([2] * count, [-0.5] * count, "", "stop", [version])
            sample.append_response_tokens(
                tokens=result.token_ids, log_probs=result.log_probs, columns=result.token_columns
            )
    return sample


def test_an_answer_tells_the_version_of_each_token():
    assert ANSWER.token_columns == {VERSIONS: [3, 3, 4]}
    margin = {"margin": (np.zeros(3),), "rows": (np.zeros((3, 2)),), "pair": (np.zeros(3), np.zeros(3))}
    assert replace(ANSWER, columns={**ANSWER.columns, **margin}).token_columns.keys() == {"margin", VERSIONS}
    assert replace(ANSWER, weight_versions=[4], columns={}).token_columns == {VERSIONS: [4, 4, 4]}
    # The position of the change is not guessed.
    assert replace(ANSWER, columns={}).token_columns == {}
    gap, sample = replace(ANSWER, columns=versions(3, 4)), Sample(tokens=[1])
    with pytest.raises(
        ValueError, match="token_versions must have one entry per generated token, got 2 for 3"
    ):
        sample.append_response_tokens(
            tokens=gap.token_ids, log_probs=gap.log_probs, columns=gap.token_columns
        )


def test_a_sample_that_continues_with_other_weights_keeps_the_versions_of_its_tokens(tmp_path):
    args = make_args()
    state = make_state(args)
    sample = Sample(index=0, group_index=0, prompt="slow len=5 :", session_id="rollout/0", reward=0.0)

    async def run() -> None:
        params = {"temperature": 1.0, "max_new_tokens": 8}
        first = asyncio.create_task(generate(args, sample, params))
        while not state.engine.running:
            await asyncio.sleep(0)
        await state.engine.abort_all()
        await first
        assert sample.status is Sample.Status.ABORTED and token_versions(sample) == [0, 0]
        state.engine.version = 3
        await generate(args, sample, params)

    asyncio.run(run())
    assert token_versions(sample) == [0, 0, 3, 3, 3, 3] and sample.weight_versions == [0, 3]
    template = str(tmp_path / "{rollout_id}.pt")
    save_debug_rollout_data(template, 4, [[sample]])
    (((again,),)) = load_debug_rollout_data(template, 4)
    assert token_versions(again) == [0, 0, 3, 3, 3, 3]


def test_a_session_keeps_the_versions_of_its_answers():
    tree, opening = TurnTree(), [1, 2]
    first = Turn(None, [], opening, {"role": "assistant"}, ANSWER, True)
    tree.add(first)
    later = replace(ANSWER, weight_versions=[5], columns={})
    tree.add(Turn(first, [], [8], {"role": "assistant"}, later, True))
    tree.add(Turn(first, [], [8, 8], {"role": "assistant"}, later, True))
    (one, _), (other, _) = tree.samples(Sample(index=0))
    assert token_versions(one) == [3, 3, 4, UNKNOWN_VERSION, 5, 5, 5]
    # The first answer is trained on in the other sample.
    assert token_versions(other) == [*[UNKNOWN_VERSION] * 5, 5, 5, 5]


def test_a_response_that_a_hook_has_changed_has_no_versions():
    sample = mixed()
    sample.tokens, sample.response_length = [*sample.tokens, 3], sample.response_length + 1
    assert token_versions(sample) == []


@pytest.mark.parametrize("masks", [False, True])
def test_staleness_of_tokens_by_hand(masks):
    """Rollout 2 may have tokens of version 1. In the first sample, two of five trained tokens are older. The second
    sample lacks its tokens' versions, so they all count as its oldest. The third sample is new."""
    known, unknown, new = mixed(), mixed(1), mixed(2)
    unknown.columns = {}
    new.columns[VERSIONS], new.weight_versions = [2] * 7, [2]
    drawn = StreamGroup([known, unknown, new], 0, [known, unknown, new])
    found = ages.figures([drawn], 2, 1, masks=masks)
    assert found == pytest.approx(
        {
            "mean": (2 + 2 + 0) / 3,
            "max": 2,
            "over_limit": 2,
            "token_mean": (2 * 2 + 3 * 1 + 5 * 2) / 15,
            "token_over_limit_frac": 7 / 15,
            "token_unknown_frac": 5 / 15,
        }
    )
    whole = [1, 1, 0, 0, 1, 1, 1]
    assert known.loss_mask == ([0, 0, 0, 0, 1, 1, 1] if masks else whole) and not known.remove_sample
    assert unknown.loss_mask == ([0] * 7 if masks else whole) and unknown.remove_sample == masks
    assert new.loss_mask == whole and not new.remove_sample


def test_a_removed_sample_has_no_trained_tokens():
    removed = mixed(remove_sample=True)
    found = ages.figures([StreamGroup([removed], 0, [removed])], 5, 1, masks=True)
    assert (found["over_limit"], found["token_mean"], found["token_over_limit_frac"]) == (1, 0, 0)
    assert removed.loss_mask == [1, 1, 0, 0, 1, 1, 1]


def test_tokens_of_several_versions_are_corrected_by_their_own_log_probs():
    """A token's weight is the trainer's old probability divided by the probability under the weights that sampled it:
    0.4 / 0.8 for version 0, and 0.6 / 0.4 for version 1."""
    sampled = {0: 0.8, 1: 0.4}
    samples = [mixed(i, reward=float(i)) for i in range(2)]
    for sample in samples:
        sample.rollout_log_probs = [
            math.log(sampled[v]) if v in sampled else 0.0 for v in token_versions(sample)
        ]
    config, hooks = border(global_batch_size=2, micro_batch_size=2)
    (data,) = make_rank_data(config, hooks, samples, 1, HF)
    names = columns.carried(data, config, training=True, policy=True)
    batch = pack(data, [0, 1], names, device="cpu", cp_rank=0, cp_size=1)
    versions = batch.columns[VERSIONS]
    assert versions.tolist() == [0, 0, -2, -2, 1, 1, 1] * 2
    old = torch.where(versions == 0, math.log(0.4), math.log(0.6))
    table = {
        "advantages": torch.ones(14),
        "old_log_probs": old,
        "loss_denominators": torch.full((14,), 10.0),
        **{name: batch.columns[name] for name in ("rollout_log_probs", "loss_masks", VERSIONS)},
    }
    log_probs = old.clone().requires_grad_()
    loss, sums, _ = policy_loss(
        config.with_values(use_tis=True),
        TokenColumns(
            log_probs=log_probs,
            entropy=torch.zeros(14),
            columns=table,
            sample_of_row=torch.tensor([0] * 7 + [1] * 7),
            total_lengths=[8, 8],
            response_lengths=[7, 7],
            normaliser=1.0,
        ),
    )
    loss.backward()
    expected = torch.tensor([-0.5, -0.5, 0, 0, -1.5, -1.5, -1.5] * 2) / 10
    torch.testing.assert_close(log_probs.grad, expected)
    assert sums["tis"].item() == pytest.approx((2 * 0.5 + 3 * 1.5) * 2 / 10)
