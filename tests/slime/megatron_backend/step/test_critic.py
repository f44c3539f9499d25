"""Tests PPO's critic on one rank: values, advantages, value loss and checkpoints, compared with transformers and by
hand."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import exported, make_samples, rank_data, train

from slime.data.rank_data import RankData
from slime.megatron_backend.model.gpt import last_part
from slime.megatron_backend.step.learner import Learner
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.types import Sample

PPO = {
    "advantage_estimator": "ppo",
    "gamma": 0.9,
    "lambd": 0.8,
    "critic_lr": 0.3,
    "value_clip": 0.1,
    "clip_grad": 0.0,
}
AWAY = {"colocate": True, "offload_train": True}


def critic_of(trainer: MegatronTrainer) -> Learner:
    return trainer.models.learners["critic"]


def with_head(trainer: MegatronTrainer, seed: int = 3) -> Tensor:
    """Gives the critic a head [1, H] that is not 0."""
    weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(seed)) / 8
    last_part(critic_of(trainer).model).value_head.weight.data.copy_(weight)
    critic_of(trainer).optimizer.reload_model_params()
    return weight


def hf_values(root, weight: Tensor, sample: Sample) -> Tensor:
    """Returns the values of the states before each response token, from transformers' last hidden states."""
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "policy")
    tokens = torch.tensor(sample.tokens)
    with torch.no_grad():
        hidden = model.model(tokens[None]).last_hidden_state[0]
    rows = slice(len(tokens) - sample.response_length - 1, len(tokens) - 1)
    return (hidden[rows] @ weight.T)[:, 0]


def mask_of(sample: Sample) -> list[int]:
    return [0] * sample.response_length if sample.remove_sample else list(sample.loss_mask or [])


def gae_by_hand(values: list[float], reward: float, mask: list[int]) -> list[float]:
    """Computes the recurrence over trained tokens, from the last to the first."""
    places = [i for i, m in enumerate(mask) if m]
    found, advantage, next_value = [0.0] * len(values), 0.0, 0.0
    for k, i in enumerate(reversed(places)):
        delta = (reward if k == 0 else 0.0) + 0.9 * next_value - values[i]
        advantage = delta + 0.9 * 0.8 * advantage
        found[i], next_value = advantage, values[i]
    return found


def test_values_advantages_and_the_first_loss(root, build):
    trainer = build(**PPO)
    assert list(trainer.models) == ["policy", "critic"]
    weight = with_head(trainer)
    result, data = train(trainer)
    samples = make_samples()
    siblings = sum(sum(s.loss_mask or []) for s in samples[-2:])
    want = {"loss": 0.0, "mean": 0.0}
    errors, returns = [], []
    for i, index in enumerate(data["sample_indices"]):
        sample, mask = samples[index], mask_of(samples[index])
        values = hf_values(root, weight, sample)
        torch.testing.assert_close(data["values"][i], values, rtol=0, atol=1e-5)
        wanted = gae_by_hand(values.tolist(), sample.reward, mask)
        assert data["advantages"][i].tolist() == pytest.approx(wanted, abs=1e-5)
        gains = torch.tensor(wanted) + values
        torch.testing.assert_close(data["returns"][i], gains, rtol=0, atol=1e-5)
        tokens = torch.tensor(mask)
        per_token = tokens / (siblings if sample.rollout_id else max(sum(mask), 1)) / 8
        want["loss"] += float(((values - gains).square() * per_token).sum())
        want["mean"] += float((values * tokens).sum() / max(sum(mask), 1)) / len(samples)
        errors.append((gains - values)[tokens == 1])
        returns.append(gains[tokens == 1])
    step = result.steps[0]
    assert step["train/critic-value_loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert step["train/critic-value_clipfrac"] == 0 and step["train/critic-lr-pg_0"] == 0.3
    assert step["train/critic-grad_norm"] > 0 and step["train/lr-pg_0"] == 0.5
    e, g = torch.cat(errors), torch.cat(returns)
    explained = 1 - float(e.var(correction=0) / g.var(correction=0))
    assert step["train/critic-explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert result.rollout["rollout/values"] == pytest.approx(want["mean"], abs=1e-5)
    assert {"perf/values_time", "perf/critic_train_time", "perf/actor_train_time"} <= set(result.perf)
    assert trainer.progress == (2 * len(data.micro_batches),) * 2


def test_a_new_head_gives_values_of_0_and_learns(build):
    """The returns are the rewards alone. The values approach their mean, so the loss falls far below its start."""
    trainer = build(**PPO | {"gamma": 1.0, "lambd": 1.0, "value_clip": 10.0, "lr": 0.0, "critic_lr": 0.02})
    losses, datas = [], []
    for rollout_id in range(4):
        result, data = train(trainer, rollout_id)
        losses.append(result.steps[0]["train/critic-value_loss"])
        datas.append(data)
    assert all(not values.any() for values in datas[0]["values"])
    assert losses[0] > losses[1] > losses[2] > losses[3] and losses[3] < 0.7 * losses[0]


def test_the_value_clip_holds_a_second_step(build):
    trainer = build(**PPO | {"global_batch_size": 4, "value_clip": 1e-4})
    with_head(trainer)
    result, _ = train(trainer)
    first, second = result.steps
    assert first["train/critic-value_clipfrac"] == 0 and second["train/critic-value_clipfrac"] > 0.5


def test_steps_of_the_critic_alone_leave_the_policy(build):
    trainer = build(**PPO, num_critic_only_steps=1, global_batch_size=4)
    start = exported(trainer)
    result, data = train(trainer, 0)
    assert all(torch.equal(tensor, start[name]) for name, tensor in exported(trainer).items())
    assert all("train/loss" not in step and "train/critic-value_loss" in step for step in result.steps)
    assert [step["train/global_batch_size"] for step in result.steps] == [4, 4]
    assert trainer.progress == (len(data.micro_batches),) * 2
    result, _ = train(trainer, 1)
    assert all("train/loss" in step for step in result.steps)
    assert any(not torch.equal(tensor, start[name]) for name, tensor in exported(trainer).items())


def test_a_critic_that_is_trained_alone_leaves_the_policy(build):
    trainer = build(**PPO, critic_train_only=True)
    start = exported(trainer)
    for rollout_id in range(2):
        result, _ = train(trainer, rollout_id)
        assert all("train/loss" not in step and "train/critic-value_loss" in step for step in result.steps)
    assert all(torch.equal(tensor, start[name]) for name, tensor in exported(trainer).items())


def test_critic_does_not_change_how_the_policy_is_trained(build):
    """With the same advantages, a run without a critic has the same steps and the same weights, to the last bit."""
    trainer = build(**PPO)
    with_head(trainer)
    wanted, data = train(trainer)
    weights, known = exported(trainer), data["advantages"]

    alone = build(disable_compute_advantages_and_returns=True, clip_grad=0.0)
    again = RankData(rank_data(alone.config, make_samples()))
    again["advantages"] = known
    got = alone.train(0, again)
    for name, value in got.steps[0].items():
        assert wanted.steps[0][name] == value, name
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported(alone).items())


@pytest.mark.parametrize("flags", [{}, {"use_distributed_optimizer": False}])
def test_resume_continues_bitwise(build, tmp_path, flags):
    flags = PPO | flags | {"save": str(tmp_path / "ckpt"), "critic_lr_warmup_iters": 2}
    whole = build(**flags)
    train(whole, 0, seed=1), train(whole, 1, seed=2)
    whole.save(1)
    wanted, _ = train(whole, 2, seed=3)
    resumed = build(**flags, load=str(tmp_path / "ckpt"))
    assert resumed.start_rollout_id == 2 and critic_of(resumed).resumed == {"rollout_id": 1}
    got, _ = train(resumed, 2, seed=3)
    assert got.steps == wanted.steps and got.rollout == wanted.rollout
    assert (tmp_path / "ckpt/critic/iter_0000001/metadata.json").is_file()


@pytest.mark.slow
def test_folders_of_its_own(build, tmp_path):
    own, ckpt = str(tmp_path / "critic"), str(tmp_path / "ckpt")
    whole = build(**PPO, save=ckpt, critic_save=own)
    train(whole, 0)
    whole.save(0)
    wanted, _ = train(whole, 1)
    assert not (tmp_path / "ckpt/critic").exists()
    resumed = build(**PPO, load=ckpt, critic_load=own)
    assert train(resumed, 1)[0].steps == wanted.steps
    started = build(**PPO, critic_load=own)  # a new run takes only the critic's weights
    assert started.start_rollout_id == 0 and critic_of(started).resumed is None
    assert last_part(critic_of(started).model).value_head.weight.any()
    # Next to the policy's checkpoint there is no critic's, so the head is new.
    after_grpo = build(**PPO, load=ckpt)
    assert after_grpo.start_rollout_id == 1 and critic_of(after_grpo).resumed is None
    assert not last_part(critic_of(after_grpo).model).value_head.weight.any()


@pytest.mark.parametrize("tied", [True, False])
def test_starts_from_every_kind_of_policy_weights(tmp_path, tied):
    """The weights are Hugging Face's with a tied or an own head, or a Megatron checkpoint of a policy."""
    from trainer_cases import make_checkpoints, make_config

    make_checkpoints(tmp_path, tie_word_embeddings=tied)
    base = {
        name: tensor
        for name, tensor in load_file(tmp_path / "policy/model.safetensors").items()
        if not name.startswith("lm_head")
    }
    saved = str(tmp_path / "save")
    files = {name: str(tmp_path / "policy") for name in ("hf_checkpoint", "load")}
    for number, flags in enumerate(({"save": saved}, {"critic_load": saved})):
        config = make_config(tmp_path, **files, **PPO, **flags)
        trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{tmp_path}/store-{number}")
        named = dict(last_part(critic_of(trainer).model).named_parameters())
        assert "output_layer.weight" not in named and not named["value_head.weight"].any()
        assert torch.equal(named["embedding.word_embeddings.weight"][:99], base["model.embed_tokens.weight"])
        assert torch.equal(named["decoder.final_layernorm.weight"], base["model.norm.weight"])
        if "save" in flags:
            trainer.policy.save(0)
        trainer.close()


@pytest.mark.parametrize("parts", [None, ["optimizer"]])
def test_away_between_its_turns(build, parts):
    """The critic equals a critic that stays, bit for bit. The states of two optimizers are never on the device
    together."""
    flags = PPO | {"use_kl_loss": True, "global_batch_size": 4, "rollout_num_gpus": 1}
    stays = build(**flags)
    with_head(stays)
    wanted = [train(stays, i)[0].steps for i in range(2)]
    trainer = build(**flags, **AWAY, offload_train_parts=parts)
    every = set(parts or ("gradients", "parameters", "optimizer"))
    assert trainer.policy.residence.away == critic_of(trainer).residence.away == every
    critic_of(trainer).residence.bring("parameters", "optimizer")
    with_head(trainer)
    critic_of(trainer).residence.release("parameters", "optimizer")
    seen = []
    for learner in (trainer.policy, critic_of(trainer)):
        learner.step = _noting(trainer, learner.step, seen)
    got = [train(trainer, i)[0].steps for i in range(2)]
    assert got == wanted
    both = [of_policy | of_critic for of_policy, of_critic in seen]
    assert both and all("optimizer" in away for away in both)
    assert critic_of(trainer).residence.away == every


def _noting(trainer, step, seen):
    def noting(*args, **kwargs):
        seen.append((trainer.policy.residence.away, critic_of(trainer).residence.away))
        return step(*args, **kwargs)

    return noting


def test_mixed_precision(build):
    trainer = build(**PPO | {"fp32": False, "bf16": True})
    result, data = train(trainer)
    assert all(values.dtype == torch.float32 for values in data["values"])
    assert result.steps[0]["train/critic-grad_norm"] > 0


def test_hugging_face_export_is_the_policy(build, tmp_path):
    trainer = build(**PPO, save=str(tmp_path / "ckpt"), save_hf=str(tmp_path / "hf"))
    train(trainer)
    trainer.save(0)
    names = set(load_file(tmp_path / "hf/model.safetensors"))
    assert names == set(exported(trainer)) and not any("value" in name for name in names)
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "qwen3"


def test_a_critic_that_diverges_is_named(build):
    trainer = build(**PPO)
    data = rank_data(trainer.config, make_samples())
    data["rewards"] = [float("inf")] * len(data["rewards"])
    rule = r"gradients must be finite, got norm (nan|inf) in step 0 of rollout 0 \(critic\); start again"
    with pytest.raises(FloatingPointError, match=rule):
        trainer.train(0, data)
