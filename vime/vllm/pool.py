"""Defines the engine pool over vLLM servers behind vllm-router."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from vime.pool.asgi import health_prefix
from vime.pool.pool import ServerPool
from vime.pool.router import RouterSpec
from vime.pool.state import Kind
from vime.vllm.client import VllmEngineClient
from vime.vllm.control import VllmControl
from vime.vllm.external_router import ExternalRouter
from vime.vllm.router import VllmRouter
from vime.vllm.server import VllmServer


def _router(spec: RouterSpec, adapter: str = "") -> VllmRouter:
    spec = replace(spec, adapter=adapter)
    return ExternalRouter(spec) if spec.external else VllmRouter(spec)


def kind_for(adapter: str) -> Kind:
    """Returns the parts of a pool whose run trains this adapter. An empty name means that the run trains whole
    weights."""
    control, client = partial(VllmControl, adapter=adapter), partial(VllmEngineClient, adapter=adapter)
    router = partial(_router, adapter=adapter)
    return Kind(control, client, router, VllmServer, "/list_workers", health_prefix)


class VllmEnginePool(ServerPool):
    """Implements EnginePool over vLLM servers behind vllm-router."""

    @property
    def facts(self) -> dict[str, object]:
        """Returns the base class's facts, with the import path of the function that makes the chat parser."""
        return {**super().facts, "chat_parser_path": "vime.vllm.chat_parser.make_parser"}

    kind = kind_for("")
