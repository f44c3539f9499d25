"""Compares the trainer's steps with shared prompts on one GPU with steps in which each sample computes its own
prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "slime"))  # the cases of the CPU tests
trainer_cases = pytest.importorskip("trainer_cases", reason="needs megatron-core")

pytestmark = pytest.mark.gpu

FLAGS = {"device": "cuda", "global_batch_size": 4, "max_tokens_per_gpu": 200, "clip_grad": 0.0}
PRECISION = {"fp32": {"fp32": True}, "bf16": {"fp32": False, "bf16": True}}
GRADIENT_ERROR = {"fp32": 1e-5, "bf16": 5e-2}
"""Largest difference of a gradient, relative to the largest value of its parameter's gradient."""


def trained(root: Path, name: str, **flags: Any) -> dict[str, Any]:
    from slime.megatron_backend.step.trainer import MegatronTrainer

    config = trainer_cases.make_config(root, weight_dir=str(root / f"weights-{name}"), **FLAGS | flags)
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{root}/store-{name}")
    data = trainer_cases.rank_data(config, trainer_cases.make_samples())
    rows = [
        len(trainer.batches.pack(data, i, training=False).part.tokens) for i in data["micro_batch_indices"]
    ]
    result = trainer.train(0, data)
    out = {
        "steps": result.steps,
        "rows": sum(rows),
        "log_probs": torch.cat([x.cpu() for x in data["old_log_probs"]]),
        "grads": {n: p.main_grad.cpu() for n, p in trainer.policy.model.named_parameters()},
    }
    trainer.close()
    return out


@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_shared_prompt_changes_no_result(tmp_path, kind, precision):
    experts = {"num_experts": 4, "moe_intermediate_size": 32} if kind == "qwen3_moe" else {}
    trainer_cases.make_checkpoints(tmp_path, kind, **experts)
    shared = trained(tmp_path, "shared", **PRECISION[precision])
    own = trained(tmp_path, "own", share_prompts=False, **PRECISION[precision])
    assert shared["rows"] < own["rows"]
    bound = GRADIENT_ERROR[precision]
    first, wanted = shared["steps"][0], own["steps"][0]
    for name in ("loss", "grad_norm", "entropy_loss"):
        assert first[f"train/{name}"] == pytest.approx(wanted[f"train/{name}"], rel=bound, abs=bound / 10), (
            name
        )
    torch.testing.assert_close(shared["log_probs"], own["log_probs"], rtol=0, atol=bound)
    for name, gradient in own["grads"].items():
        atol = bound * gradient.abs().max().item()
        torch.testing.assert_close(shared["grads"][name], gradient, rtol=0, atol=atol, msg=name)
