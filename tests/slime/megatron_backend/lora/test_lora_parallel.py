"""Compares two trainer ranks with adapters with one rank: metrics, gradient norm, adapters, merged weights,
checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import EXPERTS as MOE
from rank_processes import on_ranks
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import make_checkpoints, make_config, make_samples, rank_data

from slime.megatron_backend.checkpoint.merged import merged
from slime.megatron_backend.checkpoint.peft import export_adapters
from slime.megatron_backend.checkpoint.weights import export_hf, live
from slime.megatron_backend.parallel import destroy_parallel
from slime.megatron_backend.step.trainer import MegatronTrainer

FLAGS = {
    # There are two optimizer steps, and the gradient norm is clipped.
    "global_batch_size": 4,
    "max_tokens_per_gpu": 24,
    "balance_data": True,
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.1,
    "clip_grad": 0.05,
    "lr": 5.0,
    "lora_rank": 4,
    "lora_alpha": 8.0,
}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
WHOLE = {"expert_tensor_parallel_size": 1}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("dense", {}),
    "tp": ("dense", {"tensor_model_parallel_size": 2}),
    "sp": ("dense", SEQUENCE),
    "cp": ("dense", {"context_parallel_size": 2}),
    "pp": ("dense", {"pipeline_model_parallel_size": 2}),
    "dp-overlap": ("dense", {"overrides": {"overlap_grad_reduce": True}, "use_distributed_optimizer": False}),
    "sp-recomputed": (
        "dense",
        SEQUENCE
        | {
            "overrides": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        },
    ),
    "ep": ("experts", {"expert_model_parallel_size": 2}),
    "ep-plain": ("experts", {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}),
    "ep-sp": ("experts", {"expert_model_parallel_size": 2, **SEQUENCE, **WHOLE}),
    "sp-experts": ("experts", SEQUENCE | WHOLE),
    "pp-experts": ("experts", {"pipeline_model_parallel_size": 2}),
    "sp-hybrid": ("hybrid", SEQUENCE | WHOLE),
}
SAVED = ("sp", "pp", "ep", "ep-sp")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora-parallel")
    make_checkpoints(root / "dense")
    make_checkpoints(root / "experts", "qwen3_moe", **MOE)
    make_checkpoints(root / "hybrid", "qwen3_next")
    for kind in ("dense", "experts", "hybrid"):
        (root / f"{kind}.out").mkdir()
        torch.save(one(root, kind), root / f"one-{kind}.pt")
    on_ranks(work, root, ranks=2)
    return root


def config_of(root: Path, kind: str, name: str, **layout: Any) -> Any:
    own = {"ref_load": str(root / kind / "policy"), "weight_dir": str(root / f"{kind}.out" / name)}
    return make_config(root / kind, **(FLAGS | own | layout))


def one(root: Path, kind: str, **flags: Any) -> dict[str, Any]:
    config = config_of(root, kind, f"one{len(flags)}", **flags)
    name = "_".join(map(str, flags)) or "one"
    trainer = MegatronTrainer(
        config, 0, 1, init_method=f"file://{root}/store-{kind}-{name}-{torch.rand(1).item()}"
    )
    found = results(trainer, 0, 1)
    trainer.close()
    return found


def results(trainer: MegatronTrainer, rank: int, ranks: int, rollout_id: int = 0) -> dict[str, Any]:
    data = rank_data(trainer.config, make_samples(rollout_id), rank, ranks)
    trained = trainer.train(rollout_id, data)
    model = trainer.policy.model
    part = trainer.next_weights(rollout_id + 1, {})
    assert part is not None and trainer.next_weights(rollout_id + 1, {}) is None
    return {
        "steps": trained.steps,
        "adapters": {n: t.clone() for n, t in export_adapters(model)},
        "merged": {n: t.clone() for n, t in export_hf(model, merged(model, live))},
    }


def work(rank: int, root: Path) -> None:
    for name, (kind, layout) in LAYOUTS.items():
        more = {"save": str(root / f"saved-{name}")} if name in SAVED else {}
        config = config_of(root, kind, name, actor_num_gpus_per_node=2, **layout, **more)
        trainer = MegatronTrainer(
            config, rank, 2, init_method=f"file://{root}/store2-{name}", local_rank=rank
        )
        found = results(trainer, trainer.info.dp_rank, trainer.info.dp_size)
        if name in SAVED:
            trainer.save(0)
        torch.save(found, root / f"{name}-{rank}.pt")
        trainer.close()


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor], atol: float = 3e-6) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=1e-4, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_train_the_adapters_of_one_rank(root: Path, name: str) -> None:
    kind, _ = LAYOUTS[name]
    wanted = torch.load(root / f"one-{kind}.pt")
    assert all(tensor.any() for tensor in wanted["adapters"].values())
    for rank in (0, 1):
        found = torch.load(root / f"{name}-{rank}.pt")
        for got, step in zip(found["steps"], wanted["steps"], strict=True):
            for metric in ("train/loss", "train/grad_norm", "train/kl_loss"):
                assert got[metric] == pytest.approx(step[metric], rel=1e-4, abs=1e-6), metric
        assert_equal(found["adapters"], wanted["adapters"])
        assert_equal(found["merged"], wanted["merged"])
    published = load_file(next((root / f"{kind}.out" / name).glob("adapter-policy-lora-1/*.safetensors")))
    assert_equal(published, wanted["adapters"])


@pytest.mark.parametrize("name", SAVED)
def test_one_rank_goes_on_from_the_checkpoint(root: Path, name: str) -> None:
    kind, _ = LAYOUTS[name]
    config = config_of(root, kind, f"again-{name}", load=str(root / f"saved-{name}"))
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{root}/again-{name}")
    assert trainer.start_rollout_id == 1
    loaded = {n: t.clone() for n, t in export_adapters(trainer.policy.model)}
    assert_equal(loaded, torch.load(root / f"{name}-0.pt")["adapters"], 0)
    assert results(trainer, 0, 1, 1)["steps"][0]["train/grad_norm"] > 0
    trainer.close()


def test_a_rank_that_grouped_products_cannot_take_is_refused(root: Path) -> None:
    with pytest.raises(
        ValueError, match="--lora-rank must be a multiple of 4 with adapters of experts in .*, got 6"
    ):
        one(root, "experts", lora_rank=6)
    destroy_parallel()
