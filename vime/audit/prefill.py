"""Log-probs of given tokens from a real engine, computed all at once as a prompt (prefill), not one by one (decode).

vLLM computes prompt log-probs from the unchanged logits: at temperature 1, over the whole vocabulary.
"""

from __future__ import annotations

import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.config import Config
from slime.types import Sample
from vime.pool.control import request
from vime.vllm.server import SERVED_MODEL_NAME, VllmServer, VllmSpec
from vime.vllm.server_flags import engine_settings

_SIDE_BY_SIDE = 64
_REQUEST_S = 600.0


class PrefillEngine:
    """One engine without a router that serves `weights` as the run's engines did. A context manager."""

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
        """One fp32 tensor [response length] per sample. `side_by_side`: many concurrent requests, else one by one."""
        with ThreadPoolExecutor(_SIDE_BY_SIDE if side_by_side else 1) as pool:
            return list(pool.map(self._one, samples))

    def _one(self, sample: Sample) -> Tensor:
        body = {
            "model": SERVED_MODEL_NAME,
            "prompt": sample.tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        spec = self._server.spec
        _, answer = request(spec.url, spec.run_key, "POST", "/v1/completions", body, timeout_s=_REQUEST_S)
        return response_log_probs(json.loads(answer), sample)


def response_log_probs(answer: dict[str, Any], sample: Sample) -> Tensor:
    """The log-probs of the sample's response tokens in an answer with prompt_logprobs. ValueError if some are
    missing."""
    entries = answer["choices"][0].get("prompt_logprobs") or []
    if len(entries) != len(sample.tokens):
        raise ValueError(
            f"the engine must give one log-prob per prompt token, got {len(entries)} for {len(sample.tokens)} tokens "
            f"of sample {sample.index}; check --vllm-max-logprobs"
        )
    pairs = list(zip(sample.tokens, entries, strict=True))[-sample.response_length :]
    return torch.tensor([entry[str(token)]["logprob"] for token, entry in pairs], dtype=torch.float32)
