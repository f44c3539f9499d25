"""Manages the adapters of an engine in the server's process: vLLM's flags for their slots, their names in requests, and
the adapter whose update is running.

vLLM never reads a file of an adapter: adapters that the workers have are used as they are
(vime.vllm.worker.adapter_loader). A request names its adapter in our field `vime.vllm.group_wire.ADAPTER_FIELD`, in
SGLang's lora_path, or as the model of vLLM's own routes. A request without a name uses the base model.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from slime.config import Config
from slime.models.lora import sends_adapters
from vime.pool.control import SERVED_MODEL_NAME

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank for which vLLM has kernels."""
WAIT_S = 300.0
"""Seconds that an adapter's update waits for the end of another adapter's update."""


def adapter_name(config: Config) -> str:
    """Returns the name that requests of the run use for its adapter. The name is empty if updates bring all weights."""
    return config.lora.lora_name if sends_adapters(config) else ""


def adapter_number(name: str) -> int:
    """Computes vLLM's number of an adapter from its name. The server and its workers compute the same number without
    communication."""
    return 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % (2**31 - 1)


def settings(config: Config) -> dict[str, Any]:
    """Returns the fields of a server's record for updates that bring an adapter alone. The base weights must survive
    its sleep.

    Raises ValueError for the name of the base model.
    """
    if not sends_adapters(config):
        return {}
    if config.lora.lora_name == SERVED_MODEL_NAME:
        raise ValueError(
            f"--lora-name must not be {SERVED_MODEL_NAME}, got it; engines call the base so: choose another name"
        )
    return {"lora_rank": config.lora.lora_rank, "keeps_weights": True}


def server_flags(rank: int) -> list[str]:
    """Returns vLLM's flags for adapters up to this rank. Raises ValueError for a rank above vLLM's largest slot."""
    fits = [most for most in RANKS if most >= rank]
    if not fits:
        raise ValueError(
            f"--lora-rank must be at most {RANKS[-1]} for vLLM, got {rank}; lower it, or send whole weights with "
            "--lora-merge"
        )
    return ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(fits[0])]


def request_for(name: str) -> LoRARequest:
    """Returns the record that vLLM gets with each request for the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, adapter_number(name), "received from the trainer")


class ServedAdapters:
    """The adapters of a server. Runs that share the server update it one after the other.

    An update begins with the pause and ends with the resume. A run that sends whole weights has the empty name.
    """

    def __init__(self) -> None:
        self._served: dict[str, LoRARequest] = {}
        self._updating: str | None = None
        self._ended = asyncio.Event()

    def find(self, name: str) -> LoRARequest | None:
        """Returns the adapter of a request that names `name`, or None for the base. Raises ValueError for an adapter
        that never arrived."""
        if not name:
            return None
        if name not in self._served:
            raise ValueError(
                f"a request must name an adapter that the engine has, got {name}; it has "
                f"{', '.join(sorted(self._served)) or 'none'}"
            )
        return self._served[name]

    def serve(self, name: str, models: OpenAIServingModels) -> None:
        """Lets requests name the adapter from now on, including requests of vLLM's own routes."""
        if name and name not in self._served:
            self._served[name] = models.lora_requests[name] = request_for(name)

    async def begin(self, name: str) -> None:
        """Waits until no other adapter's update is running, then starts this one.

        Raises ValueError after `WAIT_S`, and for a name whose number another adapter has.
        """
        same = [
            other for other in self._served if other != name and adapter_number(other) == adapter_number(name)
        ]
        if same:
            raise ValueError(
                f"--lora-name must have a number of its own in the engine, got {name} with that of {same[0]}; choose "
                "another name"
            )
        try:
            async with asyncio.timeout(WAIT_S):
                while self._updating not in (None, name):
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            raise ValueError(
                f"an update of {name or 'the weights'} must begin within {WAIT_S:g} s, got one of "
                f"{self._updating or 'the weights'} that does not end; start its run again, or the engine"
            ) from None
        self._updating = name

    def end(self, name: str) -> bool:
        """Ends the update of `name`. Returns False if another adapter's update is running: the engine then stays
        paused."""
        if self._updating not in (None, name):
            return False
        self._updating = None
        self._ended.set()
        return True


async def abort_all(engine: AsyncLLM, name: str | None) -> None:
    """Aborts every request, or with a name the requests of its adapter."""
    known = engine.output_processor
    if name is None:
        await engine.abort([*known.request_states, *known.parent_requests], internal=True)
        return
    own = [key for key, state in known.request_states.items() if (state.lora_name or "") == name]
    await engine.abort(own, internal=True)
