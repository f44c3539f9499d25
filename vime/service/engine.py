"""The sampler of the service: one vLLM server, which loads adapters from their PEFT folders by vLLM's own routes."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import torch

from slime.checkpoints.hf_config import read_config_json
from slime.models import family_for
from slime.models.lora import list_modules
from slime.peers.proven_connector import ProvenConnector, RunKey
from slime.protocols.tenants import SampledPrompt, SampledTokens, TenantSampling
from vime.pool.control import SERVED_MODEL_NAME
from vime.vllm.server import VllmServer, VllmSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vime.service.store import Row

_TOKEN = "token_id:"
_CPU_CACHE_BYTES = 1 << 28
_GRAPH_SIZES = ("1", "2", "4", "8", "16", "32", "64", "96", "128", "192", "256")
"""Numbers of rows of a step for which an engine on a GPU captures CUDA graphs. vLLM pads other steps to the next size.
By default, vLLM captures about 50 sizes, each with adapters and without. Fewer sizes shorten the start."""


class TenantEngine:
    """Implements `slime.protocols.tenants.TenantSampler`. The server ends with this process, also after kill -9.

    Log-probs are those of the sampled distribution: after temperature, top-p and top-k. Log-probs of prompts are before
    them.
    """

    def __init__(
        self,
        base: Path,
        adapters: int,
        most_rank: int,
        context: int,
        run_dir: Path,
        *,
        device: str = "auto",
        memory: float | None = None,
        eager: bool = False,
    ) -> None:
        """Makes the server. With `eager`, an engine on a GPU starts faster and computes slower: no compilation, no CUDA
        graphs."""
        gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
        share = ("--gpu-memory-utilization", str(memory)) if gpu and memory is not None else ()
        speed = ("--enforce-eager",) if eager else ("--cudagraph-capture-sizes", *_GRAPH_SIZES)
        self._key, self._context = secrets.token_urlsafe(32), context
        self._server = VllmServer(
            VllmSpec(
                model_path=str(base),
                run_key=self._key,
                log_path=str(run_dir / "engine.log"),
                weight_dir=str(run_dir / "weights"),
                device="cuda" if gpu else "cpu",
                dtype="bfloat16" if gpu else "float32",
                cache_bytes=_CPU_CACHE_BYTES,
                lora_rank=most_rank,
                top_tokens=20,
                vllm_argv=(
                    *("--max-loras", str(adapters), "--max-model-len", str(context), *share),
                    *(speed if gpu else ()),
                    *("--lora-target-modules", *_list_targets(base)),
                ),
                env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            )
        )
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Returns when the server answers."""
        await asyncio.to_thread(self._server.start)
        await asyncio.to_thread(self._server.wait_ready)
        key = RunKey(self._key)
        self._session = aiohttp.ClientSession(
            connector=ProvenConnector(lambda _: key, limit=0),
            headers={"Authorization": f"Bearer {self._key}"},
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
        await asyncio.to_thread(self._server.stop)

    async def load(self, adapter: str, folder: Path) -> None:
        await self._post("/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": str(folder.resolve())})

    async def unload(self, adapter: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": adapter})

    async def sample(
        self,
        adapter: str | None,
        prompt: list[int],
        params: TenantSampling,
        n: int = 1,
        prompt_logprobs: bool = False,
        top_k_prompt: int = 0,
        top_k_sample: int = 0,
    ) -> SampledPrompt:
        """Samples `n` responses. Greedy ones are equal, so the server computes one."""
        greedy = params.temperature == 0
        body: dict[str, object] = {
            "model": adapter or SERVED_MODEL_NAME,
            "prompt": prompt,
            "max_tokens": params.max_tokens or self._context - len(prompt),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "n": 1 if greedy else n,
            "seed": params.seed,
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_end,
            "logprobs": max(1, top_k_sample),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
        }
        if prompt_logprobs or top_k_prompt:
            body["prompt_logprobs"] = max(1, top_k_prompt)
        choices = (await self._post("/v1/completions", body))["choices"]
        sequences = [_read_choice(choice, top_k_sample) for choice in choices]
        prompts = choices[0].get("prompt_logprobs") or []
        known = [
            None if entry is None else float(entry[str(token)]["logprob"])
            for token, entry in zip(prompt, prompts, strict=bool(prompts))
        ]
        return SampledPrompt(
            sequences * n if greedy else sequences,
            known or None,
            [None if entry is None else _read_top(entry, top_k_prompt) for entry in prompts] or None,
        )

    async def _post(self, path: str, body: Mapping[str, object]) -> Row:
        """Returns the server's answer. Raises ValueError for a request that the server refuses."""
        assert self._session is not None, "start() comes first"
        async with self._session.post(f"{self._server.spec.url}{path}", json=body) as response:
            if response.status in (400, 404, 422):
                raise ValueError(f"the engine must accept the request, got {(await response.text())[:500]}")
            response.raise_for_status()
            if response.content_type != "application/json":
                return {}
            answer: Row = await response.json()
            return answer


def _list_targets(base: Path) -> list[str]:
    """Returns the modules that vLLM prepares for adapters: those of the trainer, without the head.

    If the head is prepared, vLLM's CPU code takes one row per request for it. Log-probs of prompts, from two requests
    at the same time, then end the engine.
    """
    hf = read_config_json(base)
    return sorted({name.rpartition(".")[2] for name in list_modules(family_for(hf), hf, 0)} | {"experts"})


def _read_choice(choice: Row, top_k: int) -> SampledTokens:
    logprobs = choice["logprobs"]
    top = [
        sorted(
            ((int(name.removeprefix(_TOKEN)), value) for name, value in entry.items()),
            key=lambda pair: -pair[1],
        )
        for entry in logprobs["top_logprobs"]
    ]
    return SampledTokens(
        list(choice["token_ids"]),
        [float(value) for value in logprobs["token_logprobs"]],
        "length" if choice["finish_reason"] == "length" else "stop",
        [entry[:top_k] for entry in top] if top_k else None,
    )


def _read_top(entry: Row, top_k: int) -> list[tuple[int, float]]:
    found = [
        (int(token), float(value["logprob"])) for token, value in entry.items() if value["rank"] <= top_k
    ]
    return sorted(found, key=lambda pair: -pair[1])
