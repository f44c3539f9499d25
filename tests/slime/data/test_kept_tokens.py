"""Tests --replay-kept-tokens on the trainer: log-probs over the tokens that top-p kept, by hand, in every head and on
two ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from megatron_cases import VOCAB
from rank_processes import on_ranks
from trainer_cases import exported, make_config, make_samples, rank_data

from slime.data import kept_tokens
from slime.data.token_slice import token_slice
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.types import Sample

KEPT = {
    "replay_kept_tokens": 8,
    "rollout_top_p": 0.9,
    "rollout_temperature": 0.8,
    "advantage_estimator": "gspo",  # gspo needs the old log-probs
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
}


def arrays(ids: list[int], counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The engine column of tokens that kept `counts` of `ids`."""
    return np.array(ids, np.int32), np.array(counts, np.int32)


def with_sets(samples: list[Sample], seed: int = 0) -> list[Sample]:
    """Adds kept ids to the samples: up to 6 per token, its own id among them; one token in five was not cut."""
    rng = random.Random(seed)
    for sample in samples:
        targets = sample.tokens[-sample.response_length :]
        rows = []
        for target in targets:
            others = rng.sample([t for t in range(VOCAB) if t != target], rng.randint(0, 5))
            rows.append([] if rng.random() < 0.2 else [target, *others])
        kept_tokens.append(sample, arrays([t for row in rows for t in row], [len(row) for row in rows]))
    return samples


def cut_log_probs(model, sample: Sample, temperature: float) -> torch.Tensor:
    tokens, n = torch.tensor(sample.tokens), sample.response_length
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(tokens) - n - 1 : -1] / temperature
    for j, (a, b) in enumerate(
        zip(sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_offsets[1:], strict=False)
    ):
        if a < b:
            keep = torch.zeros(VOCAB, dtype=torch.bool)
            keep[sample.rollout_top_p_token_ids[a:b]] = True
            logits[j, ~keep] = -torch.inf
    return logits.log_softmax(-1).gather(-1, tokens[-n:, None])[:, 0]


def test_the_record_of_a_sample_grows_with_it():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-1.0, -1.0])
    kept_tokens.append(sample, arrays([3, 9, 4], [2, 1]))
    sample.append_response_tokens(tokens=[5, 6], trainable=False)  # a tool's tokens
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0])
    kept_tokens.append(sample, arrays([7, 8, 9], [3]))
    assert sample.rollout_top_p_token_offsets == [0, 2, 3, 3, 3, 6]
    assert kept_tokens.read_sample(sample).tolist() == [
        [3, 9, -1],
        [4, -1, -1],
        [-1, -1, -1],
        [-1, -1, -1],
        [7, 8, 9],
    ]
    with pytest.raises(
        ValueError, match="rollout_top_p_token_offsets must have 2 entries .* got none for sample"
    ):
        kept_tokens.read_sample(Sample(tokens=[1, 2], response_length=1))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_of_a_micro_batch(ranks):
    """Each row that predicts a response token has that token's set, on the context-parallel rank that computes the
    row."""
    lengths, responses = [7, 12, 3], [4, 9, 2]
    records = [
        torch.arange(100 * i, 100 * i + 2 * r, dtype=torch.int32).view(r, 2) for i, r in enumerate(responses)
    ]
    data = {kept_tokens.COLUMN: records}
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        part = token_slice(lengths, rank=rank, size=ranks, multiple=2)
        rows = kept_tokens.packed(data, [0, 1, 2], part)
        assert len(rows) == part.rows
        found |= {int(place): row.tolist() for place, row in zip(part.tokens, rows, strict=False)}
    first = 0
    for length, response, record in zip(lengths, responses, records, strict=True):
        for place in range(length):
            j = place - (length - response - 1)
            assert found[first + place] == (record[j].tolist() if 0 <= j < response else [-1, -1])
        first += length


def test_old_log_probs_by_hand(root, build):
    trainer = build(**KEPT)
    samples = with_sets(make_samples())
    data = rank_data(trainer.config, samples)
    trainer.train(0, data)
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "policy")
    for i, index in enumerate(data["sample_indices"]):
        wanted = cut_log_probs(model, samples[index], 0.8)
        torch.testing.assert_close(data["old_log_probs"][i], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_every_head_takes_the_same_step(build, estimator):
    """The heads are fused in blocks, without logits, from logits, and in plain PyTorch."""
    found = []
    for flags in (
        {"rlk_fast": "off"},
        {"rl_kernel_ops": ["linear_token_loss,linear_logp"]},
        {"rl_kernel_ops": ["linear_logp"]},
        {"rl_kernel_ops": ["logp"]},
    ):
        trainer = build(**KEPT | {"advantage_estimator": estimator} | flags)
        step = trainer.train(0, rank_data(trainer.config, with_sets(make_samples()))).steps[0]
        found.append((step, exported(trainer)))
    for step, weights in found[1:]:
        assert step == pytest.approx(found[0][0], rel=1e-4, abs=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, found[0][1][name], rtol=0, atol=1e-5, msg=name)


def test_without_sets_nothing_changes(build):
    """Samples whose tokens were not cut train like a run without the flag."""
    wanted = build(**KEPT | {"replay_kept_tokens": 0})
    step = wanted.train(0, rank_data(wanted.config, make_samples())).steps[0]
    trainer, samples = build(**KEPT), make_samples()
    for sample in samples:
        kept_tokens.append(sample, arrays([], [0] * sample.response_length))
    assert trainer.train(0, rank_data(trainer.config, samples)).steps[0] == pytest.approx(
        step, rel=1e-5, abs=1e-6
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "dp": {},
    "pp": {"pipeline_model_parallel_size": 2},
    "tp-off": {"tensor_model_parallel_size": 2, "rlk_fast": "off"},
}
SHORT = ["sp", "cp"]


def run(root: Path, flags: dict[str, Any], rank: int, ranks: int, name: str) -> dict[str, Any]:
    given = KEPT | {"global_batch_size": 4, "max_tokens_per_gpu": 24} | flags
    config = make_config(root, actor_num_gpus_per_node=ranks, **given)
    store = f"file://{root}/store-kept-{name}-{ranks}"
    trainer = MegatronTrainer(config, rank, ranks, init_method=store, local_rank=rank)
    data = rank_data(config, with_sets(make_samples()), trainer.info.dp_rank, trainer.info.dp_size)
    out = {"steps": trainer.train(0, data).steps, "weights": exported(trainer)}
    trainer.close()
    return out


def work(rank: int, root: Path, names: list[str]) -> None:
    torch.save({n: run(root, LAYOUTS[n], rank, 2, n) for n in names}, root / f"kept-{rank}.pt")


@pytest.mark.parametrize(
    "names",
    [SHORT, pytest.param([name for name in LAYOUTS if name not in SHORT], marks=pytest.mark.slow)],
    ids=["short", "every"],
)
def test_two_ranks_train_as_one(root, names):
    one = run(root, {}, 0, 1, "-".join(names))
    on_ranks(work, root, names, ranks=2)
    for rank in range(2):
        for name, got in torch.load(root / f"kept-{rank}.pt").items():
            for a, b in zip(got["steps"], one["steps"], strict=True):
                assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name
            for key, tensor in got["weights"].items():
                torch.testing.assert_close(
                    tensor, one["weights"][key], rtol=0, atol=1e-5, msg=f"{name} {key}"
                )


def test_records_of_all_samples_are_as_wide_as_the_widest():
    rows = kept_tokens.same_width([np.array([[1]], np.int32), np.array([[2, 3]], np.int32)])
    assert [x.tolist() for x in rows] == [[[1, -1]], [[2, 3]]]


def test_figures_count_tokens_without_a_set():
    a, b = Sample(response_length=3), Sample(response_length=1)
    kept_tokens.append(a, arrays([5, 6, 7, 8], [1, 3, 0]))
    kept_tokens.append(b, arrays([], [0]))
    assert kept_tokens.figures([a, b]) == {"top_p_not_kept_frac": 0.5, "top_p_kept_vocab_per_token": 2.0}
    assert kept_tokens.figures([Sample()]) == {}
