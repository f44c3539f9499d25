"""Tests on-policy distillation with a teacher on the trainer's ranks: its log-probs compared with transformers, the
reverse KL in the advantages by hand, and two ranks compared with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron_cases import tiny_checkpoint
from rank_processes import on_ranks
from trainer_cases import exported, hf_log_probs, make_config, make_samples, rank_data, train

from slime.megatron_backend.step.trainer import MegatronTrainer

COEF = 0.5
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def teacher(root) -> Path:
    """Makes a teacher of another shape: three layers, wider, with its own head."""
    shape = {"hidden_size": 48, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": 3}
    tiny_checkpoint(root / "teacher", "llama", **shape, tie_word_embeddings=False)
    return root / "teacher"


def opd(teacher: Path, **flags: Any) -> dict[str, Any]:
    return {
        "use_opd": True,
        "opd_type": "megatron",
        "opd_kl_coef": COEF,
        "opd_teacher_load": str(teacher),
        **flags,
    }


@pytest.mark.parametrize("whitened", [False, True])
def test_log_probs_and_advantages_by_hand(root, teacher, build, whitened):
    plain, without = train(build(lr=0.0, rollout_temperature=TEMPERATURE))
    trainer = build(**opd(teacher, rollout_temperature=TEMPERATURE, normalize_advantages=whitened, lr=0.0))
    assert list(trainer.models) == ["policy", "teacher"]
    result, data = train(trainer)
    student = transformers.AutoModelForCausalLM.from_pretrained(root / "policy")
    master = transformers.AutoModelForCausalLM.from_pretrained(teacher)
    samples, wanted, masks = make_samples(), [], []
    for i, index in enumerate(data["sample_indices"]):
        with torch.no_grad():
            own, _ = hf_log_probs(student, samples[index], TEMPERATURE)
            of_teacher, _ = hf_log_probs(master, samples[index], TEMPERATURE)
        torch.testing.assert_close(data["teacher_log_probs"][i], of_teacher, rtol=0, atol=1e-5)
        torch.testing.assert_close(data["opd_reverse_kl"][i], own - of_teacher, rtol=0, atol=1e-5)
        wanted.append(without["advantages"][i] - COEF * (own - of_teacher))
        masks.append(data["loss_masks"][i])
    if whitened:
        flat, mask = torch.cat(wanted), torch.cat(masks).bool()
        mean, var = flat[mask].mean(), flat[mask].var()
        wanted = [m * (x - mean) / (var + 1e-8).sqrt() for x, m in zip(wanted, masks, strict=True)]
    for got, want in zip(data["advantages"], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert {"rollout/teacher_log_probs", "rollout/opd_reverse_kl"} <= set(result.rollout)
    assert "perf/teacher_log_probs_time" in result.perf and "rollout/opd_reverse_kl" not in plain.rollout


def test_the_policy_as_its_own_teacher_changes_nothing(root, build):
    """The KL is 0, so advantages and steps equal those of the run without a teacher, also with a coefficient of 0."""
    wanted, _ = train(build())
    for flags in (opd(root / "policy"), opd(root / "reference", opd_kl_coef=0.0)):
        got, data = train(build(**flags))
        assert got.steps[0] == pytest.approx(wanted.steps[0], rel=1e-5, abs=1e-6)
    assert any(kl.any() for kl in data["opd_reverse_kl"])


def test_the_kl_to_the_teacher_falls(teacher, build):
    """With rewards of 0, the policy's log-probs come nearer to the teacher's on the trained tokens. (The mean of
    their difference is no KL here, because the policy did not sample them.)"""
    trainer = build(
        **opd(teacher, opd_kl_coef=1.0, adam_eps=1e-8, lr=2e-3, disable_rewards_normalization=True)
    )
    found = []
    for rollout_id in range(8):
        samples = make_samples()
        for sample in samples:
            sample.reward = 0.0
        data = rank_data(trainer.config, samples)
        trainer.train(rollout_id, data)
        trained = torch.cat(data["loss_masks"]) == 1
        found.append(float(torch.cat(data["opd_reverse_kl"])[trained].abs().mean()))
    assert max(found[4:]) < 0.4 * found[0]


def test_a_custom_advantage_function_gets_the_penalty_too(teacher, build):
    trainer = build(**opd(teacher, custom_advantage_function_path="trainer_cases.advantage_hook", lr=0.0))
    _, data = train(trainer)
    for advantages, kl in zip(data["advantages"], data["opd_reverse_kl"], strict=True):
        torch.testing.assert_close(advantages, 2.0 - COEF * kl)


def test_samples_bring_the_log_probs_of_a_served_teacher(build):
    trainer = build(use_opd=True, opd_type="vllm", opd_kl_coef=COEF)
    assert list(trainer.models) == ["policy"]
    samples = make_samples()
    with pytest.raises(ValueError, match="the loss must have the columns teacher_log_probs, got"):
        trainer.train(0, rank_data(trainer.config, samples))
    for sample in samples:
        sample.teacher_log_probs = [-3.0] * sample.response_length
    data = rank_data(trainer.config, samples)
    trainer.train(0, data)
    for old, kl in zip(data["old_log_probs"], data["opd_reverse_kl"], strict=True):
        torch.testing.assert_close(kl, old + 3.0)
    samples[3].teacher_log_probs[1] = float("nan")
    with pytest.raises(ValueError, match="teacher_log_probs must be finite, got nan for 1 tokens; check"):
        trainer.train(0, rank_data(trainer.config, samples))


LAYOUTS: dict[str, dict[str, Any]] = {
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
}
SHORT = "sp"


def run(root: Path, name: str, rank: int, ranks: int) -> dict[str, Any]:
    """Runs two rollouts of two optimizer steps each."""
    flags = opd(root / "teacher", global_batch_size=4, max_tokens_per_gpu=24, normalize_advantages=True)
    if name == "pp":
        flags["opd_teacher_load"] = str(root / "reference")  # 3 layers do not divide into two equal stages
    config = make_config(root, actor_num_gpus_per_node=ranks, **flags, **(LAYOUTS[name] if ranks > 1 else {}))
    store = f"file://{root}/store-{name}-{ranks}"
    trainer = MegatronTrainer(config, rank, ranks, init_method=store, local_rank=rank)
    out: dict[str, Any] = {}
    for rollout_id in range(2):
        data = rank_data(config, make_samples(rollout_id), trainer.info.dp_rank, trainer.info.dp_size)
        result = trainer.train(rollout_id, data)
        out[f"steps-{rollout_id}"], out[f"rollout-{rollout_id}"] = result.steps, result.rollout
    out["weights"] = exported(trainer)
    trainer.close()
    return out


def work(rank: int, root: Path, names: list[str]) -> None:
    torch.save({name: run(root, name, rank, 2) for name in names}, root / f"teacher-{rank}.pt")


@pytest.mark.parametrize(
    "names",
    [[SHORT], pytest.param([name for name in LAYOUTS if name != SHORT], marks=pytest.mark.slow)],
    ids=["short", "every"],
)
def test_two_ranks_train_as_one(root, teacher, names):
    on_ranks(work, root, names, ranks=2)
    for rank in range(2):
        found = torch.load(root / f"teacher-{rank}.pt")
        for name in names:
            one = run(root, name, 0, 1) if rank == 0 else None
            if one is None:
                one = ONE[name]
            ONE[name] = one
            for i in range(2):
                for a, b in zip(found[name][f"steps-{i}"], one[f"steps-{i}"], strict=True):
                    assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name
                assert found[name][f"rollout-{i}"] == pytest.approx(one[f"rollout-{i}"], rel=1e-4, abs=1e-5)
            for key, tensor in found[name]["weights"].items():
                torch.testing.assert_close(
                    tensor, one["weights"][key], rtol=0, atol=1e-5, msg=f"{name} {key}"
                )


ONE: dict[str, dict[str, Any]] = {}
