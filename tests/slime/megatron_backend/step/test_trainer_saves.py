"""Tests the files of a trainer: checkpoints in the background, for every trained role, and its part of the kept
samples."""

from __future__ import annotations

import pytest
import torch
import transformers
from trainer_cases import exported, hf_log_probs, make_checkpoints, make_samples, rank_data, train

from slime.checkpoints.checkpoint_dir import latest
from slime.checkpoints.checkpoint_files import iterations
from slime.data.rank_data import mark_saved_samples
from slime.tracking.samples import read_samples, write_samples

PPO = {"advantage_estimator": "ppo", "kl_coef": 0.0}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param(PPO, marks=pytest.mark.slow),
        pytest.param(
            {"colocate": True, "offload_train": True, "optimizer_cpu_offload": True}, marks=pytest.mark.slow
        ),
        pytest.param(
            {
                **{"colocate": True, "offload_train": True, "params_dtype": "bfloat16"},
                "use_precision_aware_optimizer": True,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_saves_in_the_background_resume_exactly(build, tmp_path, flags):
    save = tmp_path / "saved"
    flags = {**flags, "save": str(save), "async_save": True, "max_actor_ckpt_to_keep": 2}
    trainer = build(**flags)
    for rollout_id in range(3):
        train(trainer, rollout_id, seed=rollout_id)
        trainer.save(rollout_id)
    after = [train(trainer, 3, seed=3)[0].steps, exported(trainer)]
    trainer.finish_save()
    for directory in [save, save / "critic"] if "advantage_estimator" in flags else [save]:
        assert latest(directory) == 2 and iterations(directory) == [1, 2]
    resumed = build(**flags | {"load": str(save)})
    assert resumed.start_rollout_id == 3
    assert train(resumed, 3, seed=3)[0].steps == after[0]
    for name, tensor in exported(resumed).items():
        assert torch.equal(tensor, after[1][name]), name


def test_fp32_weights_of_a_bf16_model_resume_with_their_own_moments(build, tmp_path):
    """The decay rates of linear attention stay in fp32, so a group of the optimizer has weights of two dtypes."""
    make_checkpoints(tmp_path / "hybrid", "qwen3_next")
    policy = str(tmp_path / "hybrid" / "policy")
    flags = {"hf_checkpoint": policy, "ref_load": policy, "fp32": False, "bf16": True, "adam_eps": 1e-3}
    trainer = build(**flags, load=policy, save=str(tmp_path / "saved"))
    train(trainer, 0, seed=0)
    trainer.save(0)
    after = [train(trainer, 1, seed=1)[0].steps, exported(trainer)]
    resumed = build(**flags, load=str(tmp_path / "saved"))
    assert train(resumed, 1, seed=1)[0].steps == after[0]
    weights = exported(resumed)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32, torch.bfloat16}
    for name, tensor in weights.items():
        assert torch.equal(tensor, after[1][name]), name


def test_frozen_parameters_are_published_and_saved(root, build, tmp_path):
    """The run trains one layer, but engines and checkpoints get all weights."""
    flags = {"only_train_params_name_list": [r"layers\.1\."], "save": str(tmp_path / "saved")}
    trainer = build(**flags)
    before = exported(trainer)
    train(trainer)
    after = exported(trainer)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("model.layers.1.")}
    trainer.save(0)
    resumed = build(**flags | {"load": str(tmp_path / "saved")})
    assert all(torch.equal(tensor, after[name]) for name, tensor in exported(resumed).items())


@pytest.mark.parametrize("host", [False, True])
def test_states_that_are_reset_are_those_of_a_first_step(build, host):
    """Without momentum of earlier rollouts, a second training equals the first one of a run from the same weights."""
    flags = {"optimizer_cpu_offload": host, "reset_optimizer_states": True, "adam_beta1": 0.5}
    trainer = build(**flags)
    train(trainer, 0, seed=0)
    (only,) = trainer.policy.optimizer.chained_optimizers
    train(trainer, 1, seed=1)
    states = list(only.optimizer.state.values())
    assert {float(state["step"]) for state in states} == {1.0}
    reset = [state["exp_avg"].clone() for state in states]
    train(trainer, 1, seed=1)  # other weights now, and moments of this step only
    assert {float(state["step"]) for state in states} == {1.0}
    kept = build(**flags | {"reset_optimizer_states": False})
    train(kept, 0, seed=0)
    train(kept, 1, seed=1)
    (only,) = kept.policy.optimizer.chained_optimizers
    states = list(only.optimizer.state.values())
    assert {float(state["step"]) for state in states} == {2.0}
    assert any(not torch.equal(state["exp_avg"], r) for state, r in zip(states, reset, strict=True))


def test_padding_of_the_vocabulary_can_be_given(build):
    losses = []
    for flags in ({"padded_vocab_size": 110}, {}):
        trainer = build(**flags)
        assert trainer.policy.model.module.sizes.padded_vocab == flags.get("padded_vocab_size", 128)
        losses.append(train(trainer)[0].steps[0]["train/pg_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_critic_is_frozen_by_the_same_names_and_its_head_never(build):
    trainer = build(**PPO, only_train_params_name_list=[r"layers\.1\."])
    models = {name: learner.model.module for name, learner in trainer.models.learners.items()}
    before = {
        (role, name): p.clone() for role, model in models.items() for name, p in model.named_parameters()
    }
    train(trainer)
    after = {(role, name): p for role, model in models.items() for name, p in model.named_parameters()}
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    head = ("critic", "value_head.weight")
    assert head in moved and {role for role, _ in moved} >= {"critic"}
    assert all(key == head or ".layers.1." in key[1] for key in moved)


@pytest.mark.parametrize("flags", [{}, {"global_batch_size": 2, "max_tokens_per_gpu": 24}])
def test_the_samples_that_the_rollout_keeps_get_their_advantages_and_log_probs(root, build, tmp_path, flags):
    """One step computes the log-probs from before it, and four steps need a pass for old log-probs."""
    samples = make_samples()
    trainer = build(run_dir=str(tmp_path), **flags)
    data = rank_data(trainer.config, samples)
    mark_saved_samples([data], kept := [0, 3, 7, 8])
    write_samples(tmp_path, 0, samples, kept, str)
    trainer.train(0, data)
    found = {one.place: one for one in read_samples(tmp_path, 0)}
    assert list(found) == kept
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "policy")
    for place in kept:
        i = data["partition"].index(place)
        with torch.no_grad():
            log_probs, _ = hf_log_probs(model, samples[place], 1.0)
        assert [token.trainer for token in found[place].tokens] == pytest.approx(log_probs.tolist(), abs=1e-4)
        mask, values = data["loss_masks"][i].float(), data["advantages"][i]
        assert found[place].advantage == pytest.approx(float((values * mask).sum() / mask.sum()), abs=1e-5)
    trainer.train(1, rank_data(trainer.config, samples))  # this rollout keeps no sample
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["0.jsonl", "0.trainer-0.jsonl"]
