"""Tests the trainer on one rank, with real Megatron: gradients compared with transformers, the columns of a step,
hooks, resume."""

from __future__ import annotations

import gc
import math
import os
import re
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import trainer_cases as cases
import transformers
from rank_processes import on_ranks
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import exported, hf_log_probs, make_samples, rank_data, train

from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.weight_sync.file_channel import require_checksums

LR = 0.5


def test_train_data_of_a_rank_are_saved(build, tmp_path):
    """The file loads without running code, and has the trained data: masks, log-probs, advantages."""
    trainer = build(
        use_kl_loss=True,
        get_mismatch_metrics=True,
        save_debug_train_data=str(tmp_path / "{rollout_id}" / "{rank}.pt"),
    )
    _, data = train(trainer, rollout_id=3)
    saved = torch.load(tmp_path / "3" / "0.pt", weights_only=True)
    assert (saved["rollout_id"], saved["rank"]) == (3, 0)
    found, samples = saved["rollout_data"], make_samples()
    for name in ("old_log_probs", "ref_log_probs", "advantages", "returns", "loss_masks"):
        assert [len(x) for x in found[name]] == [sample.response_length for sample in samples], name
        assert all(torch.equal(x, y) for x, y in zip(found[name], data[name], strict=True)), name
    assert found["raw_reward"] == [sample.reward for sample in samples]


def test_metrics_of_a_step(root, build):
    """Means over rollouts are computed by hand from transformers' log-probs."""
    trainer = build(
        use_tis=True, tis_clip=1.1, get_mismatch_metrics=True, use_kl_loss=True, kl_loss_type="k2"
    )
    result, _ = train(trainer)
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(root / name) for name in ("policy", "reference")
    )
    samples = make_samples()
    sibling_tokens = sum(sum(s.loss_mask) for s in samples[-2:])
    want = dict.fromkeys(("tis", "tis_clipfrac", "tis_abs", "entropy_loss", "kl_loss", "diff"), 0.0)
    largest, unweighted = 0.0, 0.0
    for s in samples:
        with torch.no_grad():
            log_probs, entropy = hf_log_probs(policy, s, 1.0)
            ref, _ = hf_log_probs(reference, s, 1.0)
        mask = torch.tensor(s.loss_mask) * (not s.remove_sample)
        weight = mask / (sibling_tokens if s.rollout_id else max(int(mask.sum()), 1)) / 8
        difference = log_probs - torch.tensor(s.rollout_log_probs)
        want["tis"] += (difference.exp() * weight).sum()
        want["tis_clipfrac"] += ((difference.exp() > 1.1) * weight).sum()
        want["tis_abs"] += ((difference.exp() - 1).abs() * weight).sum()
        want["entropy_loss"] += (entropy * weight).sum()
        want["kl_loss"] += ((log_probs - ref).square() / 2 * weight).sum()
        want["diff"] += (difference.abs() * weight).sum()
        largest = max(largest, (difference.abs() * mask).max().item())
        unweighted += (log_probs * mask).sum() / max(int(mask.sum()), 1) / len(samples)
    step = result.steps[0]
    want["train_rollout_logprob_abs_diff"] = want.pop("diff")
    for name, value in want.items():
        assert step[f"train/{name}"] == pytest.approx(float(value), abs=1e-5), name
    assert step["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(largest, abs=1e-5)
    assert (step["train/ois"], step["train/ppo_kl"]) == (
        pytest.approx(7 / 8),
        0.0,
    )  # 1 rollout in 8 is removed
    assert (step["train/global_batch_size"], step["train/lr-pg_0"]) == (8, LR)
    assert result.rollout["rollout/log_probs"] == pytest.approx(float(unweighted), abs=1e-5)
    assert set(result.perf) >= {f"perf/{n}_time" for n in ("actor_train", "log_probs", "ref_log_probs")}


def test_skipping_the_recompute_changes_nothing(build):
    first, skipped = train(build())
    assert "old_log_probs" not in skipped and "perf/log_probs_time" not in first.perf
    second, recomputed = train(build(get_mismatch_metrics=True))
    assert "perf/log_probs_time" in second.perf
    assert recomputed["log_probs"] is recomputed["old_log_probs"]
    for name in ("loss", "grad_norm", "pg_loss", "entropy_loss", "ppo_kl", "pg_clipfrac"):
        assert second.steps[0][f"train/{name}"] == first.steps[0][f"train/{name}"], name


def test_several_steps_of_a_rollout_share_the_old_policy(build):
    trainer = build(global_batch_size=4)
    result, data = train(trainer)
    assert data["global_batch_sizes"] == [4, 4] and len(result.steps) == 2
    assert result.steps[0]["train/ppo_kl"] == 0
    assert abs(result.steps[1]["train/ppo_kl"]) > 1e-3  # the first step has moved the policy
    assert "train/log_probs" not in result.steps[0] | result.steps[1]
    fresh = build(global_batch_size=4, use_rollout_logprobs=True)
    same = rank_data(fresh.config, make_samples())
    same["rollout_log_probs"] = data["old_log_probs"]
    again = fresh.train(0, same)
    assert same["old_log_probs"] is same["rollout_log_probs"] and "log_probs" not in same
    assert "perf/log_probs_time" not in again.perf
    for a, b in zip(result.steps, again.steps, strict=True):
        assert a["train/loss"] == b["train/loss"] and a["train/grad_norm"] == b["train/grad_norm"]


def test_reference_stays_while_the_policy_moves(build):
    trainer = build(use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=0.1)
    before = {
        k: v.clone() for k, v in trainer.models["reference"].state_dict().items() if isinstance(v, Tensor)
    }
    start = exported(trainer)
    (first, a), (second, b) = train(trainer, 0), train(trainer, 1)
    for name, tensor in trainer.models["reference"].state_dict().items():
        assert not isinstance(tensor, Tensor) or torch.equal(tensor, before[name]), name
    for x, y in zip(a["ref_log_probs"], b["ref_log_probs"], strict=True):
        assert torch.equal(x, y)
    assert all(not torch.equal(t, start[n]) for n, t in exported(trainer).items())
    assert first.steps[0]["train/kl_loss"] > 0 and first.steps[0] != second.steps[0]
    assert list(build(use_kl_loss=False).models) == ["policy"]
    assert list(build(use_kl_loss=True, loss_type="sft_loss").models) == ["policy"]


def test_reference_follows_at_its_interval(build):
    trainer = build(use_kl_loss=True, ref_update_interval=2)
    first, _ = train(trainer, 0)
    assert "perf/ref_model_update_time" not in first.perf
    second, _ = train(trainer, 1)
    assert "perf/ref_model_update_time" in second.perf
    reference = dict(trainer.models["reference"].named_parameters())
    for name, parameter in trainer.policy.model.module.named_parameters():
        assert torch.equal(parameter, reference[name]), name
    third, _ = train(trainer, 2)
    assert third.steps[0]["train/kl_loss"] == 0.0


def test_kl_in_the_reward(build):
    """In reinforce_plus_plus, a token's return is the penalty from it to the end plus the reward."""
    trainer = build(advantage_estimator="reinforce_plus_plus", kl_coef=0.2, kl_loss_type="k1", gamma=0.9)
    result, data = train(trainer)
    removed = [s.index for s in make_samples() if s.remove_sample]
    for i, index in enumerate(data["sample_indices"]):
        sample = make_samples()[index]
        penalty = (data["old_log_probs"][i] - data["ref_log_probs"][i]).tolist()
        mask = [0] * sample.response_length if index in removed else sample.loss_mask
        last = max((t for t, m in enumerate(mask) if m), default=None)
        running, wanted = 0.0, []
        for t in reversed(range(sample.response_length)):
            if mask[t]:  # a tool's token discounts nothing
                running = -0.2 * penalty[t] + (sample.reward if t == last else 0.0) + 0.9 * running
            wanted.insert(0, running if mask[t] else 0.0)
        assert data["advantages"][i].tolist() == pytest.approx(wanted, abs=1e-6)
    assert result.rollout["rollout/kl"] != 0 and "rollout/ref_log_probs" in result.rollout


def test_custom_loss_sees_logits(build):
    """A hook that computes -A log p from its logits trains exactly like the built-in objective."""
    plain = build(clip_grad=0.0)
    wanted, _ = train(plain)
    weights = exported(plain)
    trainer = build(
        clip_grad=0.0, loss_type="custom_loss", custom_loss_function_path="trainer_cases.reinforce_loss"
    )
    result, data = train(trainer)
    _, args, shape, dtype, columns = cases.CALLS[0]
    assert args is trainer.hooks.args and dtype == torch.float32
    assert shape[0] == sum(data["response_lengths"][i] for i in data["micro_batch_indices"][0])
    assert {"tokens", "loss_masks", "log_probs", "rollout_log_probs", "rewards", "advantages"} <= set(columns)
    assert {"metadata", "prompt"} <= set(columns)
    step = result.steps[0]
    assert step["train/grad_norm"] == pytest.approx(wanted.steps[0]["train/grad_norm"], rel=1e-5)
    assert step["train/my_entropy"] == pytest.approx(wanted.steps[0]["train/entropy_loss"], rel=1e-5)
    assert step["train/count"] == pytest.approx(9 / 8)
    for name, tensor in exported(trainer).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)


def test_hooks_get_what_the_contract_says(build):
    trainer = build(
        global_batch_size=4,
        use_kl_loss=True,
        custom_megatron_init_path="trainer_cases.init_hook",
        custom_megatron_before_log_prob_hook_path="trainer_cases.log_prob_hook",
        custom_megatron_before_train_step_hook_path="trainer_cases.step_hook",
        rollout_data_postprocess_path="trainer_cases.data_hook",
        custom_advantage_function_path="trainer_cases.advantage_hook",
    )
    assert cases.CALLS.copy() == [("init", trainer.hooks.args)]
    assert trainer.hooks.args.hf_checkpoint == trainer.config.rollout.hf_checkpoint
    _, data = train(trainer, rollout_id=3)
    model = [trainer.policy.model]
    calls = {name: [call[1:] for call in cases.CALLS if call[0] == name] for name, *_ in cases.CALLS}
    assert [name for name, *_ in cases.CALLS] == [
        *("init", "data", "log_prob", "log_prob", "advantage", "step", "step")
    ]
    assert (
        calls["data"][0][0] is trainer.hooks.args and calls["data"][0][1] == 3 and calls["data"][0][2] is data
    )
    assert calls["log_prob"] == [
        (trainer.hooks.args, [trainer.models["reference"]], "ref_"),
        (trainer.hooks.args, model, ""),
    ]
    assert {"log_probs", "ref_log_probs", "rewards", "loss_masks"} <= set(calls["advantage"][0][1])
    rest = (model, trainer.policy.optimizer, trainer.policy.scheduler)
    assert calls["step"] == [(trainer.hooks.args, 3, 0, *rest), (trainer.hooks.args, 3, 1, *rest)]
    assert all((a == 2).all() for a in data["advantages"])


def test_the_loss_follows_a_flag_that_a_hook_changes(build):
    trainer = build(
        global_batch_size=4,
        use_kl_loss=True,
        kl_loss_type="k2",
        custom_megatron_before_train_step_hook_path="trainer_cases.kl_hook",
    )
    steps = train(trainer)[0].steps
    for step, weight in zip(steps, (0.5, 0.25), strict=True):
        terms = step["train/pg_loss"], step["train/kl_loss"]
        assert terms[1] > 0 and step["train/loss"] == pytest.approx(terms[0] + weight * terms[1], rel=1e-5)


def test_sft_loss_needs_no_engine(build):
    trainer = build(loss_type="sft_loss", rollout_temperature=0.5)
    samples = make_samples()
    for sample in samples:
        sample.rollout_log_probs = sample.reward = None
    losses = [trainer.train(i, rank_data(trainer.config, samples)).steps[0]["train/loss"] for i in range(3)]
    assert losses[0] == pytest.approx(math.log(cases.VOCAB), abs=2) and losses[0] > losses[1] > losses[2]


def test_resume_continues_bitwise(build, tmp_path):
    flags = {"lr_decay_style": "cosine", "min_lr": 0.01, "save": str(tmp_path / "ckpt"), "lr_warmup_iters": 1}
    whole = build(**flags)
    train(whole, 0, seed=1), train(whole, 1, seed=2)
    whole.save(1)
    wanted, _ = train(whole, 2, seed=3)
    weights = exported(whole)
    resumed = build(**flags, load=str(tmp_path / "ckpt"))
    assert resumed.start_rollout_id == 2
    got, _ = train(resumed, 2, seed=3)
    assert got.steps == wanted.steps and got.rollout == wanted.rollout
    assert 0.01 < got.steps[0]["train/lr-pg_0"] < LR
    for name, tensor in exported(resumed).items():
        assert torch.equal(tensor, weights[name]), name
    resumed.save(2)
    assert build(**flags, load=str(tmp_path / "ckpt")).start_rollout_id == 3
    assert build(**flags, load=str(tmp_path / "ckpt"), ckpt_step=1).start_rollout_id == 2


def test_load_without_a_checkpoint_starts_afresh(root, build, tmp_path):
    """The cases are the first start of a run whose --load is its --save, and an HF directory as --load."""
    (tmp_path / "empty").mkdir()
    for load, source in (("empty", "reference"), ("absent", "reference"), (root / "policy", "policy")):
        trainer = build(load=str(tmp_path / load))
        file = load_file(root / source / "model.safetensors")
        assert trainer.start_rollout_id == 0
        assert all(torch.equal(tensor, file[name]) for name, tensor in exported(trainer).items()), load


def test_saves_a_hugging_face_directory(build, tmp_path):
    trainer = build(
        save=str(tmp_path / "ckpt"), save_hf=str(tmp_path / "hf-{rollout_id}"), no_save_optim=True
    )
    train(trainer)
    trainer.save(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf-0")
    for name, tensor in exported(trainer).items():
        assert torch.equal(model.state_dict()[name], tensor), name
    restarted = build(load=str(tmp_path / "ckpt"))  # it has weights and position, and new moments
    assert restarted.start_rollout_id == 1
    (only,) = restarted.policy.optimizer.chained_optimizers
    assert all(not state["exp_avg"].any() for state in only.optimizer.state.values())


def test_published_file_is_the_export(build):
    trainer = build(check_weight_update_equal=True)
    train(trainer)
    weights = exported(trainer)
    update = trainer.next_weights(5, {})
    assert update.version == 5 and update.lasting
    assert trainer.next_weights(5, {}) is None, "a file is one part"
    file = load_file(update.info["path"])
    assert file.keys() == weights.keys() == update.info["checksums"].keys()
    for name, tensor in weights.items():
        assert torch.equal(file[name], tensor), name
    require_checksums(weights.keys(), weights.__getitem__, update.info["checksums"])
    again = trainer.weights_file()  # an engine that starts later reads it
    assert (again.version, again.info.keys()) == (1, {"path"})
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(again.info["path"]).items())


def test_a_gradient_that_is_not_finite_ends_the_run(build):
    trainer = build()
    data = rank_data(trainer.config, make_samples())
    data["rewards"] = [math.inf] * len(data["rewards"])
    rule = (
        r"gradients must be finite, got norm (nan|inf) in step 0 of rollout 0; start again with a lower --lr"
    )
    with pytest.raises(FloatingPointError, match=rule):
        trainer.train(0, data)


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_are_not_finite_end_the_run_where_they_arise(build, when):
    """The error is not left to the engine, which would get the weights with the next update."""
    trainer = build()
    data = rank_data(trainer.config, make_samples())
    *_, last = trainer.policy.model.parameters()

    def spoil(*_: Any, **__: Any) -> None:
        last.data.view(-1)[0] = math.nan

    rule = "gradients must be finite, got norm nan in step 0 of rollout 3"
    if when == "before":
        spoil()
    else:
        rule = "weights must be finite, got nan after training rollout 3"
        trainer.policy.scheduler.step = spoil
    with pytest.raises(FloatingPointError, match=rule):
        trainer.train(3, data)


def held() -> tuple[int, list[str]]:
    """Returns the number of this process's threads, and its open files."""
    process = psutil.Process()
    with os.scandir("/proc/self/fd") as entries:
        targets = [os.readlink(entry.path) for entry in entries]
    return process.num_threads(), sorted(re.sub(r"\d+", "N", target) for target in targets)


def close_and_count(_: int, root: Path, stores: Path) -> None:
    def built(name: str, **flags: Any) -> MegatronTrainer:
        config = cases.make_config(root, weight_dir=str(stores / "weights"), **flags)
        return MegatronTrainer(config, 0, 1, init_method=f"file://{stores / name}")

    first = built("first")
    train(first)
    first.close()  # torch now has everything that it starts once per process
    gc.collect()
    gc.disable()
    before = held()
    trainer = built("second", use_kl_loss=True, kl_loss_coef=0.1)
    train(trainer)
    threads, files = held()
    assert threads > before[0] + 30 and len(files) > len(before[1]) + 30
    kept = [
        weakref.ref(model.get_parameter(name))
        for model in (trainer.policy.model, trainer.models["reference"])
        for name, _ in [next(model.named_parameters())]
    ]
    trainer.close()
    assert held() == before
    assert [parameter() for parameter in kept] == [None, None]
    trainer.close()


def test_a_closed_trainer_frees_its_threads_files_and_model_at_once(root, tmp_path):
    """The test runs without the garbage collector, which may run late and leaves frozen objects alone.

    It uses a child process, because earlier tests left work in this process that opens files at any time.
    """
    on_ranks(close_and_count, root, tmp_path, ranks=1)


def test_steps_of_several_sizes_are_means_over_their_own_samples(build):
    """The first step of sizes 4 and 4 equals that of 4, 1 and 3, and every sample is trained."""
    equal, _ = train(build(global_batch_size=4))
    flags = {"global_batch_size_schedule": [4, 1, 3], "variable_global_batch_size": True}
    result, data = train(build(global_batch_size=4, num_steps_per_rollout=3, **flags))
    assert [step["train/global_batch_size"] for step in result.steps] == [4, 1, 3]
    for name in ("loss", "grad_norm", "pg_loss", "lr-pg_0"):
        assert result.steps[0][f"train/{name}"] == equal.steps[0][f"train/{name}"], name
    assert result.steps[1]["train/grad_norm"] != equal.steps[1]["train/grad_norm"]
    assert sorted(data["partition"]) == list(range(len(make_samples())))
