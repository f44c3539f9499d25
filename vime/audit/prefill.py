"""Gets log-probs of given tokens from a real engine, computed all at once as a prompt (prefill), not one by one
(decode).

vLLM computes prompt log-probs from the unchanged logits: at temperature 1, over the whole vocabulary.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

import torch
from torch import Tensor

from slime.config import Config
from slime.types import Sample
from slime.vision.requests import request_images
from vime.vllm.client import VllmEngineClient
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import engine_settings

_SIDE_BY_SIDE = 64
_REQUEST_S = 600.0


class PrefillEngine:
    """A context manager that runs one engine without a router. It serves `weights` with the settings of the run's
    engines."""

    def __init__(self, config: Config, weights: str, scratch: Path) -> None:
        settings = engine_settings(config) | {
            "model_path": weights,
            "weight_dir": str(scratch),
            "run_key": secrets.token_hex(32),
            "log_path": str(scratch / "engine.log"),
            "cpu_threads": os.cpu_count() or 1,
        }
        self._server = VllmServer(VllmSpec(**settings))

    def __enter__(self) -> PrefillEngine:
        try:
            self._server.start()
            self._server.wait_ready()
        except BaseException:
            self._server.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()

    def log_probs(self, samples: list[Sample], *, side_by_side: bool) -> list[Tensor]:
        """Returns one fp32 tensor [response length] per sample. With `side_by_side` it sends many concurrent requests,
        else one request at a time."""
        return asyncio.run(self._scored(samples, _SIDE_BY_SIDE if side_by_side else 1))

    async def _scored(self, samples: list[Sample], at_once: int) -> list[Tensor]:
        client = VllmEngineClient(self._server.spec.url, self._server.spec.run_key)
        slots = asyncio.Semaphore(at_once)

        async def one(sample: Sample) -> Tensor:
            start = len(sample.tokens) - sample.response_length
            async with slots:
                images = request_images(sample.multimodal_train_inputs)
                found = await client.score(sample.tokens, start=start, deadline_s=_REQUEST_S, **images)
            return torch.from_numpy(found.log_probs.copy())

        try:
            return await asyncio.gather(*map(one, samples))
        finally:
            await client.close()
