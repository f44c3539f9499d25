"""Compares the plan's memory of Muon and of remainders with real optimizers on a CPU, and with numbers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from megatron_cases import make_config, tiny_checkpoint
from memory_cases import QWEN3_4B, config

from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.muon import Matrix, Muon, MuonSettings
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.plan.memory_estimate import estimate
from slime.plan.model_shape import Shape
from slime.plan.rank_params import rank_params
from slime.plan.step_memory.optimizer_state import muon_step, optimizer_state, saved_state

MUON: dict[str, Any] = {"optimizer": "muon", "use_distributed_optimizer": False}
ENDS = 151936 * 2560


def plan_items(**flags: Any) -> dict[str, Any]:
    found = estimate(config(**flags), QWEN3_4B)
    return {item.name: item for item in (*found.kept, *found.work)}


def test_the_plan_by_hand() -> None:
    params = Shape.of(QWEN3_4B).params
    found = plan_items(**MUON)
    assert found["optimizer"].bytes == params * 8 + ENDS * 4  # Adam: 12 bytes per weight
    assert (
        found["optimizer"].arithmetic == "4.02 G x 8 B / TP 1 + 389 M of embedding and head x 4 B / 1 shards"
    )
    assert found["optimizer step"].bytes == 12 * 2 * 9728 * 2560
    assert "optimizer step" not in plan_items()
    assert saved_state(config(**MUON), Shape.of(QWEN3_4B)) == params * 8 + ENDS * 4
    assert saved_state(config(), Shape.of(QWEN3_4B)) == params * 12


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_the_state_is_that_of_the_optimizer(tmp_path: Path, kind: str) -> None:
    """The plan does not count norms, and the number of steps."""
    tiny_checkpoint(tmp_path, kind, vocab_size=128)
    hf = load_hf_config(tmp_path)
    c = make_config(**MUON)
    model = build_model(hf, c)
    optimizer, _ = build_optimizer(model, c, total_steps=1)
    (chained,) = optimizer.chained_optimizers
    state = sum(
        value.nbytes
        for weight, values in chained.optimizer.state.items()
        for value in values.values()
        if weight.dim() > 1 and value.dim()
    )
    planned = sum(optimizer_state(c, one)[0] for one in rank_params(c, Shape.of(hf), trained=True))
    assert planned == state


@pytest.mark.parametrize(("precision", "each"), [("medium", 12), ("highest", 12 + 8 / 4)])
def test_a_step_adds_what_the_plan_counts(tmp_path: Path, precision: str, each: float) -> None:
    settings = MuonSettings(0.95, True, 5, "spectral", 1.0, precision, "quintic", True, False)
    weight = torch.nn.Parameter(torch.randn(1024, 256))
    groups = [{"params": [weight], "lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}]
    muon = Muon(groups, {weight: Matrix()}, settings)
    weight.grad = torch.randn_like(weight)
    assert peak_bytes(muon.step, tmp_path / "trace.json") == pytest.approx(each * weight.numel(), rel=0.01)
    hf = QWEN3_4B | {"intermediate_size": 512, "hidden_size": 256}
    c = config(**MUON, overrides={"muon_fp32_matmul_prec": precision})
    assert muon_step(c, Shape.of(hf))[0] == each * weight.numel()


@pytest.mark.parametrize(
    ("flags", "bytes_per_weight", "noted"),
    [
        ({}, 12, False),
        ({"use_precision_aware_optimizer": True}, 10, False),
        ({"use_precision_aware_optimizer": True, "fp32": True}, 8, True),
        ({"use_precision_aware_optimizer": True, "use_distributed_optimizer": False}, 12, True),
        ({"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}, 0, True),
        ({"use_precision_aware_optimizer": True, "overrides": {"store_param_remainders": False}}, 12, True),
    ],
)
def test_remainders_of_main_weights(flags, bytes_per_weight, noted):
    c = config(**flags)
    assert estimate(c, QWEN3_4B).sum_part("optimizer") == bytes_per_weight * 4_022_272_000
    notes = [
        note for note in c.notes if note.startswith("--use-precision-aware-optimizer has no effect with --")
    ]
    assert len(notes) == noted


def test_remainders_need_the_gradients_of_a_slice_in_float32():
    flags = {"overrides": {"grad_reduce_in_fp32": False}}
    whole, small = (
        {item.name: item.bytes for item in estimate(config(**flags, **more), QWEN3_4B).work}["optimizer step"]
        for more in ({}, {"use_precision_aware_optimizer": True})
    )
    assert whole == 4 * 4_022_272_000 and small == 12 * 2**25
