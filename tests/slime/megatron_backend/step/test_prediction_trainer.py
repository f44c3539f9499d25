"""Tests a trainer with --enable-mtp-training: the policy, checkpoints, exports, layouts of ranks, and bad flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from config_cases import HF_CONFIG
from megatron_cases import tiny_checkpoint
from rank_processes import on_ranks
from safetensors.torch import load_file
from trainer_cases import exported, make_config, make_samples, rank_data

from slime.checkpoints.hf_config import read_hf_config
from slime.megatron_backend.checkpoint.export import export_checkpoint
from slime.megatron_backend.checkpoint.torch_dist import load_torch_dist
from slime.megatron_backend.checkpoint.torch_dist_save import save_torch_dist
from slime.megatron_backend.model.gpt import unwrapped
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.plan.model_shape import Shape
from slime.plan.rank_params import rank_params
from slime.rules.model_args import check_model_args
from slime.rules.prediction import check_prediction

KINDS: dict[str, dict[str, Any]] = {
    "mimo": {"num_nextn_predict_layers": 2},
    "glm4_moe": {"num_nextn_predict_layers": 1, "head_dim": 16},
    "deepseek_v3": {"num_nextn_predict_layers": 1},
}
TRAINED = {"enable_mtp_training": True, "load": None, "ref_load": None}


SLOW = ("deepseek_v3",)


@pytest.fixture(
    scope="module", params=[pytest.param(k, marks=[pytest.mark.slow] if k in SLOW else []) for k in KINDS]
)
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    shape = {"hidden_size": 32, "intermediate_size": 48, "tie_word_embeddings": False}
    tiny_checkpoint(root / "policy", request.param, **shape, **KINDS[request.param])
    return root


def is_predicted(name: str) -> bool:
    return "mtp_layers" in name or "layers.2." in name  # the tiny models have two decoder layers


def rollout(trainer: MegatronTrainer, rollout_id: int = 0) -> dict[str, float]:
    data = rank_data(trainer.config, make_samples(rollout_id))
    (step,) = trainer.train(rollout_id, data).steps
    return step


def test_the_policy_keeps_its_bits(build: Any, root: Path) -> None:
    """Without clipping, this holds at any weight of the loss. With clipping it holds at weight 0, as the norm counts
    all gradients."""
    start = load_file(root / "policy/model.safetensors")
    for off, on in (
        ({"clip_grad": 0.0}, {"clip_grad": 0.0, "mtp_loss_scaling_factor": 0.4}),
        ({"clip_grad": 0.01}, {"clip_grad": 0.01, "mtp_loss_scaling_factor": 0.0}),
    ):
        plain = build(**TRAINED | {"enable_mtp_training": False} | off)
        wanted, weights = rollout(plain), exported(plain)
        trainer = build(**TRAINED | on)
        step, new = rollout(trainer), exported(trainer)
        assert new.keys() == weights.keys() | {name for name in start if is_predicted(name)} - copies(start)
        for name in weights:  # a norm with more zeros may round differently
            atol = 1e-7 if off["clip_grad"] else 0
            torch.testing.assert_close(new[name], weights[name], rtol=0, atol=atol, msg=name)
        assert step["train/loss"] == wanted["train/loss"] and step["train/mtp_loss"] > 3
        moved = [not torch.equal(new[name], start[name]) for name in new if is_predicted(name)]
        assert sum(moved) > 10 if on["mtp_loss_scaling_factor"] else not any(moved)
        if not on["mtp_loss_scaling_factor"]:
            assert step["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-6)
        else:
            assert step["train/grad_norm"] > wanted["train/grad_norm"]


def copies(names: Any) -> set[str]:
    return {name for name in names if name.endswith((".2.embed_tokens.weight", "shared_head.head.weight"))}


def test_the_loss_falls_and_a_checkpoint_brings_the_layers_back(
    build: Any, root: Path, tmp_path: Path
) -> None:
    trainer = build(**TRAINED | {"save": str(tmp_path / "saved"), "mtp_loss_scaling_factor": 1.0})
    first = rollout(trainer)
    trainer.save(0)
    weights = exported(trainer)
    second = rollout(trainer)
    assert second["train/mtp_loss"] < first["train/mtp_loss"]
    again = build(**TRAINED | {"load": str(tmp_path / "saved"), "mtp_loss_scaling_factor": 1.0})
    assert {n: x.tolist() for n, x in exported(again).items()} == {n: x.tolist() for n, x in weights.items()}
    assert rollout(again) == second
    later = exported(again)
    path = save_torch_dist(again.policy.model, tmp_path / "megatron", str(root / "policy"))
    fresh = build(**TRAINED)
    assert any(not torch.equal(x, later[n]) for n, x in exported(fresh).items())
    load_torch_dist(fresh.policy.model, path)
    assert all(torch.equal(x, later[n]) for n, x in exported(fresh).items())
    build.end()  # an export has its own process groups
    source = make_config(root, load=str(tmp_path / "saved"))
    assert export_checkpoint(source, None, tmp_path / "hf").startswith("checkpoint 0")
    written = load_file(tmp_path / "hf/model.safetensors")
    assert written.keys() == load_file(root / "policy/model.safetensors").keys()
    assert all(torch.equal(written[n], x) for n, x in weights.items())
    assert all(
        torch.equal(written[n], written["lm_head.weight"]) for n in written if n.endswith("head.head.weight")
    )


def counts(trainer: MegatronTrainer) -> tuple[float, float]:
    """Returns the elements of this rank's matrices without padding of the vocabulary, and the estimate for the
    largest rank."""
    found = 0
    for inner in unwrapped(trainer.policy.model):
        for name, parameter in inner.named_parameters():
            if parameter.dim() > 1:
                ends = "word_embeddings" in name or "output_layer" in name
                found += 99 * parameter.shape[1] if ends else parameter.numel()
    shape = Shape.of(trainer.hf_config)
    return found, sum(params for _, params, *_ in rank_params(trainer.config, shape))


def run_layouts(rank: int, root: Path, out: Path, names: list[str]) -> None:
    """Runs a step in every layout on two ranks."""
    for name in names:
        flags = LAYOUTS[name]
        config = make_config(root, actor_num_gpus_per_node=2, weight_dir=str(out / name), **TRAINED, **flags)
        trainer = MegatronTrainer(config, rank, 2, init_method=f"file://{out}/store-{name}")
        steps = trainer.train(
            0, rank_data(config, make_samples(), trainer.info.dp_rank, trainer.info.dp_size)
        ).steps
        weights, found = exported(trainer), counts(trainer)
        trainer.close()
        torch.save((steps, weights, found), out / f"{name}-{rank}.pt")


LAYOUTS: dict[str, dict[str, Any]] = {
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp-native": {"context_parallel_size": 2, "rlk_fast": "off"},
    "recompute": {
        "overrides": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
    "ep": {"expert_model_parallel_size": 2},
}
SHORT = ["sp", "cp", "pp"]
"""The layouts of the short suite."""


def compare(build: Any, root: Path, out: Path, names: list[str]) -> None:
    trainer = build(**TRAINED)
    wanted = rollout(trainer)
    weights = exported(trainer)
    on_ranks(run_layouts, root, out, names, ranks=2)
    for name in names:
        (step,), got, _ = torch.load(out / f"{name}-0.pt")
        for metric in ("loss", "mtp_loss", "grad_norm"):
            assert step[f"train/{metric}"] == pytest.approx(wanted[f"train/{metric}"], rel=1e-4), (
                name,
                metric,
            )
        assert got.keys() == weights.keys()
        for tensor in weights:
            torch.testing.assert_close(
                got[tensor], weights[tensor], rtol=0, atol=1e-5, msg=f"{name} {tensor}"
            )


def test_two_ranks_equal_one(build: Any, root: Path, tmp_path: Path) -> None:
    compare(build, root, tmp_path, SHORT)
    check_estimate(build(**TRAINED), tmp_path)


def check_estimate(trainer: MegatronTrainer, out: Path) -> None:
    """The estimate counts every matrix in these layers: on one rank, and on the larger of two pipeline stages."""
    found, estimated = counts(trainer)
    assert found == estimated
    ranks = [torch.load(out / f"pp-{rank}.pt")[2] for rank in (0, 1)]
    assert max(found for found, _ in ranks) == ranks[0][1] == ranks[1][1]
    plain = sum(n for _, n, *_ in rank_params(trainer.config, Shape.of(trainer.hf_config), predicts=False))
    assert estimated - plain > 32 * 64  # the product of embedding and state, and a layer


@pytest.mark.slow
def test_two_ranks_equal_one_in_the_other_layouts(build: Any, root: Path, tmp_path: Path) -> None:
    sparse = read_hf_config(root / "policy")["model_type"] != "mimo"
    compare(build, root, tmp_path, [n for n in LAYOUTS if n not in SHORT and (sparse or n != "ep")])


@pytest.mark.slow
def test_a_tied_head_on_another_stage(build: Any, tmp_path: Path) -> None:
    """The last stage has a copy of the embedding for the head and for the layers."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "tie_word_embeddings": True}
    tiny_checkpoint(tmp_path / "policy", "mimo", **shape)
    places = {"hf_checkpoint": str(tmp_path / "policy")}
    wanted, weights = rollout(trainer := build(**TRAINED, **places)), exported(trainer)
    on_ranks(run_layouts, tmp_path, tmp_path, ["pp"], ranks=2)
    (step,), got, _ = torch.load(tmp_path / "pp-0.pt")
    check_estimate(trainer, tmp_path)
    assert step["train/mtp_loss"] == pytest.approx(wanted["train/mtp_loss"], rel=1e-5)
    assert got.keys() == weights.keys()
    for tensor in weights:
        torch.testing.assert_close(got[tensor], weights[tensor], rtol=0, atol=1e-5, msg=tensor)


def test_flags_for_a_model_without_such_layers(root: Path) -> None:
    config = make_config(root, **TRAINED)
    hf_config = read_hf_config(root / "policy")
    check_prediction(config, hf_config)
    with pytest.raises(ValueError, match="--enable-mtp-training must be left out .* got 0 such layers"):
        check_prediction(config, hf_config | {"num_nextn_predict_layers": 0})
    with pytest.raises(ValueError, match="got model_type qwen3; an export has a copy"):
        check_prediction(config, HF_CONFIG)
    check_prediction(make_config(root), HF_CONFIG)
    with pytest.raises(ValueError, match="--mtp-num-layers is 1, config.json has 0"):
        check_model_args({"mtp_num_layers": 1}, HF_CONFIG)
    virtual = {"pipeline_model_parallel_size": 1, "num_virtual_stages_per_pipeline_rank": 2}
    # Without a pipeline there are no virtual stages.
    check_prediction(make_config(root, **TRAINED, **virtual), hf_config)
    for flags, name in (
        ({"num_virtual_stages_per_pipeline_rank": 2}, "--num-virtual-stages-per-pipeline-rank"),
        ({"pipeline_model_parallel_layout": "E|t|t|L"}, "--pipeline-model-parallel-layout"),
    ):
        deep = hf_config | {"num_hidden_layers": 4 if "virtual" in name else 2}
        stages = make_config(root, **TRAINED, pipeline_model_parallel_size=2, **flags)
        with pytest.raises(ValueError, match=f"{name} must give .* one stage with --enable-mtp-training"):
            check_prediction(stages, deep)
    engine = make_config(root, **TRAINED, overrides={"transformer_impl": "transformer_engine"})
    with pytest.raises(ValueError, match="--transformer-impl must be local with --enable-mtp-training"):
        check_prediction(engine, hf_config)
