"""Experts that the ranks of an engine share, on CPUs: log-probs are those of transformers, before and after updates of
live weights, and each rank compares its own experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import publish_checkpoint
from test_engine_experts import TOKENS, make_experts, of_transformers

from slime.protocols import WeightUpdate

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def log_probs(llm: Any) -> torch.Tensor:
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (out,) = llm.generate({"prompt_token_ids": TOKENS}, settings, use_tqdm=False)
    pairs = zip(TOKENS[1:], out.prompt_logprobs[1:], strict=True)
    return torch.tensor([found[token].logprob for token, found in pairs])


def take(llm: Any, update: WeightUpdate, *, load: bool = True) -> None:
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=({**update.message(), "info": {**update.info, "load": load}},))
    llm.collective_rpc("finish_weight_update")


def experts_of_a_layer(worker: Any) -> int:
    experts = worker.model_runner.model.model.layers[1].mlp.experts.routed_experts
    return int(experts.w13_weight.shape[0])


def test_two_ranks_share_the_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [make_experts(tmp_path / str(seed), seed) for seed in (0, 1)]
    expected = [of_transformers(model) for model in models]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for experts_of_a_layer
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setenv("VIME_WEIGHT_DIR", str(tmp_path / "weights"))
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM replaces it
    from vllm import LLM

    llm = LLM(
        str(tmp_path / "0"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        weight_transfer_config={"backend": "vime"},
        disable_log_stats=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
    )
    try:
        assert llm.collective_rpc(experts_of_a_layer) == [2, 2]
        torch.testing.assert_close(log_probs(llm), expected[0], rtol=0, atol=1e-5)
        for version, model in ((1, 1), (2, 0)):
            update = publish_checkpoint(tmp_path / str(model), tmp_path / "weights", version, checksums=True)
            take(llm, update)
            torch.testing.assert_close(log_probs(llm), expected[model], rtol=0, atol=1e-5)
        update = publish_checkpoint(tmp_path / "1", tmp_path / "weights", 3, checksums=True)
        with pytest.raises(Exception, match="live weights must equal"):
            take(llm, update, load=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
