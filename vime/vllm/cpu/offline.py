"""vLLM in the process of a test: log-probs of given tokens, and updates of weights as an engine of a run takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from slime.protocols import WeightUpdate
from vime.vllm.server import WORKERS
from vime.vllm.worker.adapter import request_for

if TYPE_CHECKING:
    from vllm import LLM

WORKER = WORKERS["cuda" if torch.cuda.is_available() else "cpu"]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # allows functions for workers in other processes
}
"""Variables of the process, set before vLLM is imported. VIME_WEIGHT_DIR names the folder of the updates."""
SETTINGS: dict[str, object] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "weight_transfer_config": {"backend": "vime"},
    "worker_cls": WORKER,
    "disable_log_stats": True,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}
"""Arguments of `vllm.LLM` for a tiny model."""


Worker: TypeAlias = Any
"""A worker of vLLM, a function with it, or the result of its method."""


class OfflineEngine:
    """An engine without a server."""

    @classmethod
    def from_folder(cls, folder: str, **settings: object) -> OfflineEngine:
        """Starts vLLM with a checkpoint. `settings` replace `SETTINGS`."""
        from vllm import LLM

        return cls(LLM(folder, **{**SETTINGS, **settings}))  # type: ignore[arg-type]

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @property
    def worker(self) -> Worker:
        """Returns the only worker, whose class depends on the device."""
        return self._llm.llm_engine.model_executor.driver_worker.worker

    def on_workers(self, act: Worker, *args: object) -> list[Worker]:
        """Calls each worker's method by its name, or a function with each worker."""
        found: list[Worker] = self._llm.collective_rpc(act, args=args)
        return found

    def log_probs(self, tokens: list[int], adapter: str = "") -> torch.Tensor:
        """Returns the log-prob of every token but the first, given the tokens before it, from the base or from an
        adapter."""
        from vllm import SamplingParams

        self._llm.reset_prefix_cache()
        settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        lora = request_for(adapter) if adapter else None
        (out,) = self._llm.generate({"prompt_token_ids": tokens}, settings, use_tqdm=False, lora_request=lora)
        assert out.prompt_logprobs is not None
        pairs = zip(tokens[1:], out.prompt_logprobs[1:], strict=True)
        return torch.tensor([found[token].logprob for token, found in pairs if found])

    def stop(self) -> None:
        """Ends the engine and its process group."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def take(self, update: WeightUpdate, *, load: bool = True) -> None:
        """Loads the update, and with checksums compares every live tensor. A tensor that differs is a RuntimeError."""
        self.on_workers("start_weight_update")
        self.on_workers("update_weights", {**update.message(), "info": {**update.info, "load": load}})
        self.on_workers("finish_weight_update")
