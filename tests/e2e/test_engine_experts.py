"""A tiny Qwen3-MoE published to a real vLLM: its log-probs are those of transformers with the new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import publish_checkpoint
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.e2e

TOKENS = [3, 7, 50, 21, 9, 88, 40, 2, 11]


def make_experts(path: Path, seed: int) -> nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(path)
    return model


def of_transformers(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def of_engine(llm: Any) -> torch.Tensor:
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (out,) = llm.generate({"prompt_token_ids": TOKENS}, settings, use_tqdm=False)
    pairs = zip(TOKENS[1:], out.prompt_logprobs[1:], strict=True)
    return torch.tensor([found[token].logprob for token, found in pairs])


def push(worker: Any, update: Any, *, load: bool) -> None:
    """Load, and compare every live tensor; RuntimeError when one differs."""
    worker.start_weight_update()
    worker.update_weights({**update.info, "checksums": update.checksums, "load": load})
    worker.finish_weight_update()


def check_each_live_tensor(worker: Any, update: Any) -> None:
    """One changed element of the router or of an expert, as the kernel reads it, is found under its name."""
    layer = worker.model_runner.model.model.layers[1].mlp
    w13, w2 = layer.experts.routed_experts.w13_weight.data, layer.experts.routed_experts.w2_weight.data
    # the kernel's own order: element 2 of an expert is in row 2 of the gate, and from its middle on it has rows of up
    places = {"2.gate": w13[2].flatten()[2:3], "0.up": w13[0].flatten()[-1:], "3.down": w2[3].flatten()[:1]}
    for name, place in places.items():
        before = place.clone()
        place.copy_(torch.nextafter(before, torch.tensor(9.0)))
        with pytest.raises(
            RuntimeError, match=rf"got 1 that differ: model\.layers\.1\.mlp\.experts\.{name}_proj"
        ):
            push(worker, update, load=False)
        place.copy_(before)
    push(worker, update, load=False)
    packed = layer.gate.cpu_linear
    layer.gate.cpu_linear = lambda x, weight, bias: packed(x, weight, bias) + 1
    with pytest.raises(RuntimeError, match=r"got 1 that differ: model\.layers\.1\.mlp\.gate\.weight"):
        push(worker, update, load=False)
    layer.gate.cpu_linear = packed


def test_published_experts_are_computed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [make_experts(tmp_path / str(seed), seed) for seed in (0, 1)]
    expected = [of_transformers(model) for model in models]
    assert (expected[0] - expected[1]).abs().max() > 0.1
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setenv("VIME_WEIGHT_DIR", str(tmp_path / "weights"))
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM replaces it
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(tmp_path / "0"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        weight_transfer_config={"backend": "vime"},
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )
    try:
        torch.testing.assert_close(of_engine(llm), expected[0], rtol=0, atol=1e-5)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        for version, model in ((1, 1), (2, 0)):
            update = publish_checkpoint(tmp_path / str(model), tmp_path / "weights", version, checksums=True)
            push(worker, update, load=True)
            torch.testing.assert_close(of_engine(llm), expected[model], rtol=0, atol=1e-5)
        check_each_live_tensor(worker, update)
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
