"""The engine pool over SGLang servers behind sglang-router."""

from __future__ import annotations

from vime.pool.pool import ServerPool
from vime.pool.state import Kind
from vime.sglang.client import SglangEngineClient
from vime.sglang.control import SglangControl
from vime.sglang.router import SglangRouter
from vime.sglang.server import SglangServer


class SglangEnginePool(ServerPool):
    """EnginePool over SGLang servers. `frees_memory` must be false."""

    kind = Kind(SglangControl, SglangEngineClient, SglangRouter, SglangServer, "/workers", lambda key: "/")
