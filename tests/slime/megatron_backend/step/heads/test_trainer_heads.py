"""Compares every head of the trainer, which computes log-probs from hidden states, on one rank with transformers in
float64."""

from __future__ import annotations

import math
import statistics
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from trainer_cases import exported, hf_log_probs, make_checkpoints, make_samples, train

import rl_kernel
from slime.megatron_backend.model.gpt import head_main_grad
from slime.megatron_backend.step import learner as learner_module
from slime.megatron_backend.step import native
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.types import Sample


def plain_advantages(samples: list[Sample]) -> list[float]:
    """Computes (r - mean) / (std + 1e-6) over the rollouts of a group. Siblings count with the mean of their
    rewards."""
    groups: dict[Any, dict[Any, list[float]]] = {}
    for s in samples:
        rollout = s.rollout_id or f"sample {s.index}"
        groups.setdefault(s.group_index, {}).setdefault(rollout, []).append(s.reward)
    out = []
    for s in samples:
        values = [statistics.mean(rewards) for rewards in groups[s.group_index].values()]
        out.append((s.reward - statistics.mean(values)) / (statistics.stdev(values) + 1e-6))
    return out


def plain_loss(root: Any, args: Any) -> tuple[Tensor, nn.Module]:
    """Computes the GRPO objective of `make_samples()` sample by sample in float64, as the papers define it."""
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float64)
        for name in ("policy", "reference")
    ]
    samples, total = make_samples(), torch.zeros((), dtype=torch.float64)
    masks = [torch.tensor(s.loss_mask) * (not s.remove_sample) for s in samples]
    for s, mask, advantage in zip(samples, masks, plain_advantages(samples), strict=True):
        log_probs, entropy = hf_log_probs(models[0], s, args.rollout_temperature)
        with torch.no_grad():
            ref, _ = hf_log_probs(models[1], s, args.rollout_temperature)
        rollout = torch.tensor(s.rollout_log_probs, dtype=torch.float32).double()
        old = rollout if args.use_rollout_logprobs else log_probs.detach()
        ratio = (log_probs - old).exp()
        bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
        token = -torch.minimum(ratio * advantage, bounded * advantage)
        if args.use_tis:
            token = token * (old - rollout).exp().clamp(args.tis_clip_low, args.tis_clip)
        if args.use_kl_loss:
            token = token + args.kl_loss_coef * ((ref - log_probs).exp() - 1 - (ref - log_probs))
        token = token - args.entropy_coef * entropy
        if args.calculate_per_token_loss:
            denominator = sum(max(int(m.sum()), 1) for m in masks)
        else:
            siblings = [m for o, m in zip(samples, masks, strict=True) if s.rollout_id and o.rollout_id]
            denominator = 8 * max(sum(int(m.sum()) for m in siblings or [mask]), 1)
        total = total + (token * mask).sum() / denominator
    return total, models[0]


GRADIENT_CASES = {
    "per_sample_mean": {},
    "per_token_mean": {"calculate_per_token_loss": True},
    "static_micro_batches": {"use_dynamic_batch_size": False, "micro_batch_size": 3},
    "off_policy_kl_entropy": {
        "use_rollout_logprobs": True,
        "use_kl_loss": True,
        "kl_loss_type": "k3",
        "kl_loss_coef": 0.3,
        "entropy_coef": 0.05,
        "rollout_temperature": 0.7,
    },
    "importance_weights": {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.7},
}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    root = tmp_path_factory.mktemp("untied")
    make_checkpoints(root, tie_word_embeddings=False)
    return root


ALL_TERMS = GRADIENT_CASES["off_policy_kl_entropy"]


def gradients(trainer: MegatronTrainer) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Returns a step's metrics and its gradients."""
    result, _ = train(trainer)
    named = trainer.policy.model.named_parameters()
    return result.steps[0], {name: parameter.main_grad.clone() for name, parameter in named}


def assert_same_step(a: tuple[dict, dict], b: tuple[dict, dict]) -> None:
    assert a[0] == pytest.approx(b[0], rel=1e-5, abs=1e-6)
    assert a[1].keys() == b[1].keys() and max(g.abs().max() for g in b[1].values()) > 0.01
    for name, gradient in b[1].items():
        torch.testing.assert_close(a[1][name], gradient, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("overlap", [False, True])
def test_head_with_weights_of_its_own(build, untied, overlap):
    """The head's gradient bypasses autograd then, unless --overlap-grad-reduce, which counts gradients, needs it."""
    files = {name: str(untied / "policy") for name in ("hf_checkpoint", "load")}
    files["ref_load"] = str(untied / "reference")
    flags = {"clip_grad": 0.0, **ALL_TERMS, **files}
    wanted = gradients(build(**flags, rlk_fast="off"))
    one_pass = build(**flags, overrides={"overlap_grad_reduce": overlap})
    assert (head_main_grad(one_pass.policy.model) is None) is overlap
    assert_same_step(gradients(one_pass), wanted)


def test_blocks_of_tokens_by_the_kernels(build, monkeypatch):
    """With a small workspace, a GPU computes losses, metrics and maxima of a micro-batch block by block, as here."""
    flags = {"clip_grad": 0.0, **ALL_TERMS, "use_rollout_logprobs": False, "use_tis": True}
    wanted = gradients(build(**flags))
    operator, blocks = rl_kernel.linear_token_loss, []

    def by_kernels(hidden, weight, targets, token_loss, **kwargs):
        def recorded(log_probs, entropy, rows):
            blocks.append(rows)
            return token_loss(log_probs, entropy, rows)

        return operator(hidden, weight, targets, recorded, impl="triton", **kwargs)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(rl_kernel, "linear_token_loss", by_kernels)
    monkeypatch.setattr("rl_kernel.ops.linear_token_loss.autograd.block_rows", lambda *_: 5)
    assert_same_step(gradients(build(**flags)), wanted)
    assert slice(5, 10) in blocks and slice(10, 15) in blocks


def test_metrics_keep_no_logits(build, monkeypatch):
    """In the native path, a metric with a graph would keep the softmax of its micro-batch until the step has ended."""
    made: list[weakref.ref] = []
    forward = native.VocabParallelEntropy.forward

    def recorded(ctx, logits):
        out = forward(ctx, logits)
        made.extend(weakref.ref(tensor) for tensor in ctx.to_save[:2])
        return out

    alive = []
    reduce = learner_module.reduce_metrics

    def counted(losses, group):
        alive.append(sum(ref() is not None for ref in made))
        return reduce(losses, group)

    monkeypatch.setattr(native.VocabParallelEntropy, "forward", staticmethod(recorded))
    monkeypatch.setattr(learner_module, "reduce_metrics", counted)
    for coefficient in (0.0, 0.01):
        train(build(rlk_fast="off", entropy_coef=coefficient))
    assert len(made) >= 12 and alive == [0, 0]


HEADS = {
    "linear_token_loss": {},
    "linear_logp": {"rl_kernel_ops": ["linear_logp,grpo_loss,ratio_kl"]},
    "logp": {"rl_kernel_ops": ["logp"]},
    "native": {"rlk_fast": "off"},
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradient_is_that_of_the_plain_objective(root, build, name, head):
    trainer = build(clip_grad=0.0, **GRADIENT_CASES[name], **HEADS[head])
    assert trainer.trainings[-1].head.kind.name == head
    result, data = train(trainer)
    heads = {"linear_token_loss", "linear_logp", "logp"} & {
        key.split("/")[1] for key in result.perf if key.startswith("rl_kernel/")
    }
    passes = {"linear_token_loss": {"linear_logp"}} if "reference" in trainer.models else {}
    assert heads == ({head} | passes.get(head, set())) - {"native"}
    assert data["num_microbatches"][0] >= 3 and len({len(t) for t in data["tokens"]}) > 4
    loss, model = plain_loss(root, trainer.hooks.args)
    loss.backward()
    assert result.steps[0]["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    wanted = {n: p.grad for n, p in model.named_parameters()}
    norm = math.sqrt(sum(g.square().sum().item() for g in wanted.values()))
    assert norm > 0.1 and result.steps[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for parameter in trainer.policy.model.parameters():  # the export then lists gradients under HF names
        parameter.data.copy_(parameter.main_grad)
    got = exported(trainer)
    assert got.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(
            got[key].double(), gradient, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    root = tmp_path_factory.mktemp("capped")
    make_checkpoints(root, "gemma2", query_pre_attn_scalar=16)
    return root


@pytest.mark.parametrize("head", [head for head in HEADS if head != "native"])
def test_every_head_caps_the_logits(build, capped, head):
    """The reference is the native head, whose logits test_families compares with transformers."""
    files = {name: str(capped / "policy") for name in ("hf_checkpoint", "load")}
    flags = {"clip_grad": 0.0, **ALL_TERMS, **files, "ref_load": str(capped / "reference")}
    trainer = build(**flags, **HEADS[head])
    assert trainer.trainings[-1].head.kind.name == head
    assert_same_step(gradients(trainer), gradients(build(**flags, rlk_fast="off")))
