"""The plan counts the adapters that the trainer builds, and a run with adapters fits the intended GPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from megatron_cases import make_config, tiny_checkpoint

from slime.megatron_backend.lora.install import add_adapters
from slime.megatron_backend.model.gpt import build_model, unwrapped
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models.lora import Lora
from slime.plan.adapter_params import adapter_params
from slime.plan.model_shape import Shape

KINDS = ("qwen3", "llama", "glm4", "gemma3", "qwen3_moe", "qwen2_moe", "qwen3_next", "deepseek_v3", "gpt_oss")


@pytest.fixture(autouse=True)
def _one(tmp_path):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store")
    yield
    destroy_parallel()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", [None, ["o_proj"]], ids=["all", "o_proj"])
def test_the_plan_counts_the_adapters(tmp_path, kind, targets):
    tiny_checkpoint(tmp_path / kind, {"gemma3": "gemma3_text"}.get(kind, kind))
    hf = load_hf_config(tmp_path / kind)
    config = make_config(lora_rank=8, target_modules=targets)
    lora = Lora.of(config)
    model: Any = build_model(hf, config, ddp=False, adapt=partial(add_adapters, lora=lora, seed=1))
    built = sum(p.numel() for n, p in unwrapped(model)[0].named_parameters() if n.startswith("adapters."))
    shape = Shape.of(hf)
    assert adapter_params(lora, hf, range(shape.layers)).total == built > 0
