"""The adapter of an engine, in the server's process: vLLM's flags for its slot, and requests that use it.

vLLM never reads a file of it: an adapter that the workers have is used as it is (vime.vllm.worker.adapter_loader).
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from typing import Any

from slime.config import Config
from slime.models.lora import sends_adapters

VARIABLE = "VIME_LORA_NAME"
"""Of the server's environment: the name of the policy's adapter."""
ADAPTER_ID = 1
"""Its number in the engine, which has one."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank that vLLM has kernels for."""


def settings(config: Config) -> dict[str, Any]:
    """The fields of a server's record for updates that bring an adapter alone. Its base must outlive its sleep."""
    if not sends_adapters(config):
        return {}
    return {"lora_name": config.lora.lora_name, "lora_rank": config.lora.lora_rank, "keeps_weights": True}


def server_flags(rank: int) -> list[str]:
    """vLLM's flags for one adapter of this rank. ValueError for a rank that vLLM has no slot for."""
    fits = [most for most in RANKS if most >= rank]
    if not fits:
        raise ValueError(
            f"--lora-rank must be at most {RANKS[-1]} for vLLM, got {rank}; lower it, or send whole weights with "
            "--lora-merge"
        )
    return ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(fits[0])]


def install(name: str) -> None:
    """Requests of this process that name no adapter use the adapter `name`. May run more than once."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    generate = AsyncLLM.generate
    if hasattr(generate, "wraps"):
        return
    policy = LoRARequest(name, ADAPTER_ID, "received from the trainer")

    @functools.wraps(generate)
    async def adapted(self: AsyncLLM, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        if kwargs.get("lora_request") is None and len(args) < 4:
            kwargs["lora_request"] = policy
        async for output in generate(self, *args, **kwargs):
            yield output

    adapted.wraps = generate  # type: ignore[attr-defined]
    AsyncLLM.generate = adapted  # type: ignore[method-assign]
