"""Compares two trainer ranks over NCCL with one GPU: tensor, sequence, context, data and pipeline parallel, kernels
on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(
    0, str(Path(__file__).parents[1] / "slime")
)  # the cases of the CPU tests; workers inherit the path
trainer_cases = pytest.importorskip("trainer_cases", reason="needs megatron-core")

pytestmark = pytest.mark.multi_gpu

POLICY = {
    "device": "cuda",
    "global_batch_size": 4,
    "max_tokens_per_gpu": 24,
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
    "use_tis": True,
    "rl_kernel_workspace_mib": 64,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "cp-gather": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "cp-native": {"context_parallel_size": 2, "rlk_fast": "off"},
    "pp": {"pipeline_model_parallel_size": 2},
    "remainders": {"use_precision_aware_optimizer": True},
}
PRECISION = {"fp32": {"fp32": True}, "bf16": {"fp32": False, "bf16": True}}
CASES = [(name, precision) for name in LAYOUTS for precision in PRECISION]
CASES.remove(("remainders", "fp32"))  # float32 weights have no remainders
METRIC_ERROR = {"fp32": 1e-4, "bf16": 3e-2}
"""Largest difference of a metric, relative to max(1, |metric|)."""


def run(
    name: str, precision: str, layout: dict[str, Any], root: Path, rank: int, ranks: int
) -> dict[str, Any]:
    from slime.megatron_backend.step.trainer import MegatronTrainer

    flags = POLICY | PRECISION[precision] | layout | {"actor_num_gpus_per_node": ranks}
    config = trainer_cases.make_config(root, weight_dir=str(root / f"weights-{name}-{precision}"), **flags)
    store = f"file://{root}/store-{name}-{precision}"
    trainer = MegatronTrainer(config, rank, ranks, init_method=store, local_rank=rank)
    info = trainer.info
    data = trainer_cases.rank_data(config, trainer_cases.make_samples(), info.dp_rank, info.dp_size)
    result = trainer.train(0, data)
    out = {
        "steps": result.steps,
        "rollout": result.rollout,
        "perf": result.perf,
        "weights": trainer_cases.exported(trainer),
        "chosen": {d.operator: d.chosen for d in trainer.decisions},
    }
    trainer.close()
    return out


def work(rank: int, root: Path) -> None:
    out = {(name, precision): run(name, precision, LAYOUTS[name], root, rank, 2) for name, precision in CASES}
    torch.save(out, root / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpus")
    trainer_cases.make_checkpoints(root, head_dim=64, hidden_size=128)
    one = {precision: run("one", precision, {}, root, 0, 1) for precision in PRECISION}
    torch.multiprocessing.spawn(work, args=(root,), nprocs=2)
    return one, [torch.load(root / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_two_gpus_train_as_one(results, layout, precision):
    one, two = results[0][precision], [rank[layout, precision] for rank in results[1]]
    for got in two:
        assert len(got["steps"]) == len(one["steps"]) == 2
        for a, b in zip([*got["steps"], got["rollout"]], [*one["steps"], one["rollout"]], strict=True):
            assert a.keys() == b.keys()
            worst = max(a, key=lambda name: abs(a[name] - b[name]) / max(1, abs(b[name])))
            assert abs(a[worst] - b[worst]) <= METRIC_ERROR[precision] * max(1, abs(b[worst])), (
                worst,
                a[worst],
                b[worst],
            )
        for name, tensor in one["weights"].items():
            assert torch.equal(got["weights"][name], two[0]["weights"][name]), name
            if precision == "fp32":
                torch.testing.assert_close(got["weights"][name], tensor, rtol=0, atol=1e-4, msg=name)


def test_kernels_ran(results):
    one, two = results
    for precision in PRECISION:
        assert one[precision]["chosen"]["linear_token_loss"] == "triton"
        for layout in ("dp", "tp", "sp", "cp", "pp"):
            assert two[0][layout, precision]["perf"]["rl_kernel/fast"] == 1.0
        assert "rl_kernel/fast" not in two[0]["cp-native", precision]["perf"]


def test_parts_of_a_step_and_their_memory_are_measured(results):
    perf = results[1][0]["dp", "bf16"]["perf"]
    for part in ("forward", "policy_loss", "backward", "optimizer"):
        assert perf[f"perf/{part}_time"] > 0 and perf[f"perf/{part}_peak_gib"] > 0
