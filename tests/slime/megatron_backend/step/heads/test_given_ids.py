"""Tests losses over given ids in the trainer: centred scores over the sampler's top-k, forward KL and Jensen-Shannon
over a teacher's. Values are compared with full logits of transformers, and every head and two ranks with one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron_cases import VOCAB, tiny_checkpoint
from rank_processes import on_ranks
from torch import Tensor
from trainer_cases import exported, make_config, make_samples, rank_data

from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.types import Sample

TOP = 6
TEMPERATURE = 0.8
CENTRED = {"use_score_centering": True, "score_centering_top_k": TOP, "rollout_temperature": TEMPERATURE}


def centred_samples(seed: int = 0) -> list[Sample]:
    """Returns samples with the top-k of a sampler that is near the tiny policy, whose distributions are nearly flat."""
    random = torch.Generator().manual_seed(seed)
    samples = make_samples(seed)
    for sample in samples:
        logits = torch.randn(sample.response_length, VOCAB, generator=random)
        log_q = torch.log_softmax(logits, 1)
        top = log_q.topk(TOP)
        sample.rollout_topk_token_ids = top.indices.int().numpy()
        sample.rollout_topk_log_probs = top.values.numpy()
        own = torch.tensor(sample.tokens[-sample.response_length :])
        sample.rollout_log_probs = log_q.gather(1, own[:, None])[:, 0].tolist()
    return samples


def distilled(root: Path, **flags: Any) -> dict[str, Any]:
    return {
        "use_opd": True,
        "opd_type": "megatron",
        "opd_teacher_load": str(root / "teacher"),
        "opd_top_k": TOP,
        "opd_loss_type": "forward_kl",
        "opd_loss_coef": 0.7,
        "rollout_temperature": TEMPERATURE,
        **flags,
    }


@pytest.fixture(scope="module")
def teacher(root: Path) -> Path:
    shape = {"hidden_size": 48, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": 2}
    tiny_checkpoint(root / "teacher", "llama", **shape, tie_word_embeddings=False)
    return root / "teacher"


def table_of(directory: Path, sample: Sample) -> Tensor:
    """Returns log-probs [R, V] at the positions of the response, from full logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokens = torch.tensor(sample.tokens)
    rows = slice(len(tokens) - sample.response_length - 1, len(tokens) - 1)
    with torch.no_grad():
        return torch.log_softmax(model(tokens[None]).logits[0, rows].double() / TEMPERATURE, -1)


def train_on(trainer: MegatronTrainer, samples: list[Sample]) -> tuple[Any, Any]:
    data = rank_data(trainer.config, samples)
    return trainer.train(0, data), data


def step_mean(data: Any, per_token: list[Tensor]) -> float:
    parts = zip(per_token, data["loss_masks"], data["loss_denominators"], strict=True)
    return float(sum((x * mask / denominator).sum() for x, mask, denominator in parts))


def test_centred_loss_by_hand(root, build):
    """The loss is -A (log p - sum_k (q - rho p) log p), where rho is the quotient of the tails."""
    samples = centred_samples()
    result, data = train_on(build(lr=0.0, **CENTRED), samples)
    wanted = []
    for i, index in enumerate(data["sample_indices"]):
        sample = samples[index]
        log_p = table_of(root / "policy", sample)
        own = torch.tensor(sample.tokens[-sample.response_length :])
        ids = torch.tensor(sample.rollout_topk_token_ids).long()
        q, of_ids = torch.tensor(sample.rollout_topk_log_probs).double().exp(), log_p.gather(1, ids)
        p = of_ids.exp()
        rho = (1 - q.sum(1)) / (1 - p.sum(1))
        term = ((q - rho[:, None] * p) * of_ids).sum(1)
        wanted.append(-data["advantages"][i] * (log_p.gather(1, own[:, None])[:, 0] - term))
    assert result.steps[0]["train/pg_loss"] == pytest.approx(step_mean(data, wanted), abs=1e-5)


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_divergences_of_the_teachers_top_by_hand(root, teacher, build, kind):
    """The Megatron teacher's top-k equal those of transformers; the sum has one class for all other ids."""
    samples = make_samples()
    flags = distilled(root, opd_loss_type=kind, **({"opd_jsd_beta": 0.3} if kind == "jsd" else {}))
    result, data = train_on(build(lr=0.0, **flags), samples)
    wanted = []
    for i, index in enumerate(data["sample_indices"]):
        log_p, log_t = (table_of(root / name, samples[index]) for name in ("policy", "teacher"))
        top = log_t.topk(TOP)
        assert torch.equal(data["teacher_top_ids"][i].long(), top.indices)
        torch.testing.assert_close(data["teacher_top_log_probs"][i].double(), top.values, rtol=0, atol=1e-5)
        pair = [x.gather(1, top.indices).exp() for x in (log_t, log_p)]
        t, p = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in pair)
        if kind == "forward_kl":
            wanted.append((t * (t / p).log()).sum(1))
        else:
            m = 0.3 * t + 0.7 * p
            wanted.append(0.3 * (t * (t / m).log()).sum(1) + 0.7 * (p * (p / m).log()).sum(1))
        torch.testing.assert_close(
            data["teacher_log_probs"][i].double(),
            log_t.gather(1, torch.tensor(samples[index].tokens[-len(log_t) :])[:, None])[:, 0],
            rtol=0,
            atol=1e-5,
        )
    step = result.steps[0]
    assert step["train/opd_loss"] == pytest.approx(step_mean(data, wanted), abs=1e-5)
    assert step["train/loss"] == pytest.approx(step["train/pg_loss"] + 0.7 * step["train/opd_loss"], abs=1e-5)
    assert "old_log_probs" not in data and "rollout/opd_reverse_kl" not in result.rollout


def test_the_forward_kl_falls(root, teacher, build):
    trainer = build(**distilled(root, opd_loss_coef=1.0, adam_eps=1e-8, lr=2e-3))
    found = []
    for rollout_id in range(8):
        samples = make_samples()
        for sample in samples:
            sample.reward = 0.0
        result = trainer.train(rollout_id, rank_data(trainer.config, samples))
        found.append(result.steps[0]["train/opd_loss"])
    assert found == sorted(found, reverse=True) and found[-1] < 0.5 * found[0]


def test_a_served_teacher_brings_its_top(root, build):
    flags = {"use_opd": True, "opd_type": "vllm", "opd_top_k": TOP, "opd_loss_type": "jsd"}
    trainer = build(**flags)
    samples = centred_samples()
    for sample in samples:
        sample.teacher_log_probs = [-1.0] * sample.response_length
        sample.teacher_top = sample.rollout_topk_token_ids, sample.rollout_topk_log_probs
    result, _ = train_on(trainer, samples)
    assert result.steps[0]["train/opd_loss"] > 0
    samples[2].teacher_top = None
    with pytest.raises(ValueError, match="teacher_top_ids must be set on all samples or none, got 8 of 9"):
        rank_data(trainer.config, samples)


BASE = {"global_batch_size": 4, "max_tokens_per_gpu": 24, "normalize_advantages": True}
LOSSES: dict[str, dict[str, Any]] = {
    "centred": CENTRED | {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.2, "entropy_coef": 0.01},
    "forward_kl": {},
    "jsd": {"opd_loss_type": "jsd", "use_kl_loss": True, "kl_loss_coef": 0.1},
}
HEADS: dict[str, dict[str, Any]] = {
    "native": {"rlk_fast": "off"},
    "linear_logp": {"rl_kernel_ops": ["linear_logp"]},
    "logp": {"rl_kernel_ops": ["logp"]},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "sp-native": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "rlk_fast": "off"},
    "cp-native": {"context_parallel_size": 2, "rlk_fast": "off"},
}


def run(root: Path, loss: str, rank: int, ranks: int, name: str = "one", **flags: Any) -> dict[str, Any]:
    """Trains a rollout of two optimizer steps."""
    flags = BASE | (LOSSES[loss] if loss == "centred" else distilled(root, **LOSSES[loss])) | flags
    config = make_config(root, actor_num_gpus_per_node=ranks, **flags)
    store = (
        f"file://{tempfile.mkdtemp(dir=root)}/store" if ranks == 1 else f"file://{root}/store-{loss}-{name}"
    )
    trainer = MegatronTrainer(config, rank, ranks, init_method=store, local_rank=rank)
    data = rank_data(config, centred_samples(), trainer.info.dp_rank, trainer.info.dp_size)
    steps = trainer.train(0, data).steps
    out = {"steps": steps, "weights": exported(trainer)}
    trainer.close()
    return out


def check_same(found: dict[str, Any], one: dict[str, Any], name: str) -> None:
    for a, b in zip(found["steps"], one["steps"], strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name
    for key, tensor in found["weights"].items():
        torch.testing.assert_close(tensor, one["weights"][key], rtol=0, atol=1e-5, msg=f"{name} {key}")


@pytest.mark.parametrize("loss", list(LOSSES))
def test_every_head_trains_the_same(root, teacher, loss):
    one = run(root, loss, 0, 1)
    assert len(one["steps"]) == 2
    for name, flags in HEADS.items():
        check_same(run(root, loss, 0, 1, **flags), one, name)


def work(rank: int, root: Path, cases: list[tuple[str, str]]) -> None:
    found = {case: run(root, case[0], rank, 2, case[1], **LAYOUTS[case[1]]) for case in cases}
    torch.save(found, root / f"ids-{rank}.pt")


SHORT = [("centred", "sp"), ("forward_kl", "cp")]
EVERY = [(loss, layout) for loss in LOSSES for layout in LAYOUTS if (loss, layout) not in SHORT]


@pytest.mark.parametrize(
    "cases", [SHORT, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["short", "every"]
)
def test_two_ranks_train_as_one(root, teacher, cases):
    on_ranks(work, root, cases, ranks=2)
    ones = {loss: run(root, loss, 0, 1) for loss in {loss for loss, _ in cases}}
    for rank in range(2):
        found = torch.load(root / f"ids-{rank}.pt")
        for loss, layout in cases:
            check_same(found[loss, layout], ones[loss], f"{loss} {layout}")
