"""The trainer starts from converted checkpoints and from its own parts. Conversion works in both directions."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from trainer_cases import exported, make_config, train

from slime.megatron_backend.checkpoint.export import export_checkpoint


@pytest.fixture(scope="module")
def converted(root):
    """Writes root/policy and root/reference as slime's converter does."""
    for name in ("policy", "reference"):
        config = make_config(root, load=None, hf_checkpoint=str(root / name))
        assert export_checkpoint(config, None, root / f"{name}_torch_dist", "torch_dist") == str(root / name)
    return root


def test_a_run_from_converted_weights_is_bitwise_the_run_from_hugging_face_weights(converted, build):
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    expected, _ = train(trainer := build(**kl))
    weights = exported(trainer)
    policy, reference = (str(converted / f"{name}_torch_dist") for name in ("policy", "reference"))
    result, _ = train(trainer := build(**kl, load=policy, ref_load=reference))
    assert trainer.start_rollout_id == 0
    assert result.steps == expected.steps and expected.steps[0]["train/kl_loss"] != 0
    for name, tensor in exported(trainer).items():
        assert torch.equal(tensor, weights[name]), name


def test_conversion_there_and_back_is_bitwise(converted, tmp_path):
    config = make_config(converted, load=str(converted / "policy_torch_dist"))
    read = export_checkpoint(config, None, tmp_path / "hf", "hf")
    assert read == str(converted / "policy_torch_dist" / "release")
    back, hf = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", converted / "policy"))
    assert all(torch.equal(tensor, hf[name]) for name, tensor in back.items())
    assert back.keys() == hf.keys() - {"lm_head.weight"}
    assert (tmp_path / "hf" / "config.json").is_file()


def test_parts_of_a_checkpoint_can_be_left(root, build, tmp_path):
    folder = str(tmp_path / "saved")
    trainer = build(save=folder)
    train(trainer)
    trainer.save(0)
    weights = exported(trainer)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    trainer = build(load=folder)
    assert trainer.start_rollout_id == 1 and trainer.policy.scheduler.num_steps == 8
    moments = lambda: trainer.policy.optimizer.chained_optimizers[0].optimizer.state.values()  # noqa: E731
    assert any(state["exp_avg"].any() for state in moments())
    for flags, start in (({"no_load_optim": True, "no_load_rng": True}, 1), ({"finetune": True}, 0)):
        trainer = build(load=folder, **flags)
        assert trainer.start_rollout_id == start and trainer.policy.scheduler.num_steps == 0
        assert not any(state["exp_avg"].any() for state in moments())
        assert all(torch.equal(tensor, weights[name]) for name, tensor in exported(trainer).items())
        train(trainer)  # training starts from these weights, not from earlier main weights
        moved = [(tensor - weights[name]).abs().max() for name, tensor in exported(trainer).items()]
        assert 0 < max(moved) < 0.1
