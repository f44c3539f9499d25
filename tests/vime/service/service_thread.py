"""A service in a thread of this process: the real front and the real trainer, without a sampler's engine."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import tinker
from aiohttp import web

from slime.megatron_backend.tenants import build_trainer
from slime.megatron_backend.tenants.trainer import Trainer
from vime.service.app import make_app
from vime.service.engine import TenantEngine
from vime.service.limits import TenantLimits
from vime.service.service import ServiceSettings, TenantService


class ServiceThread:
    """Serves the tenants alice and bob until `stop`. Its engine never starts, so accepted samples fail."""

    def __init__(self, base: Path, data: Path, limits: TenantLimits, idle_seconds: float) -> None:
        self._base, self._data, self._limits, self._idle = base, data, limits, idle_seconds
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the service did not start within 60 s"

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    def _build(self) -> Trainer:
        most = self._limits
        self.trainer = build_trainer(self._base, most.rank, most.tokens_per_sequence, device="cpu")
        return self.trainer

    async def _serve(self) -> None:
        settings = ServiceSettings(self._base, "tiny", self._data, 259, 1000.0, self._idle)
        engine = TenantEngine(self._base, 1, 8, 256, self._data / "engine", device="cpu")
        self.service = TenantService(settings, self._limits, self._build, engine)
        await self.service.start()
        runner = web.AppRunner(make_app(self.service), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.keys = self.service.keys.add_missing(["alice", "bob"])
        self._ended = asyncio.Event()
        self._ready.set()
        await self._ended.wait()
        await runner.cleanup()
        await self.service.stop()
        self.trainer.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)

    def client(self, tenant: str) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=self.keys[tenant])

    def read_audit(self, tenant: str, action: str) -> list[dict[str, Any]]:
        """Returns the tenant's lines of an action."""
        lines = (self._data / "audit.jsonl").read_text(encoding="utf-8").splitlines()
        read = [json.loads(line) for line in lines]
        return [line for line in read if (line["tenant"], line["action"]) == (tenant, action)]

    def read_model(self, adapter: str) -> tuple[str, str]:
        """Returns the id and the status of the model with this adapter."""
        with sqlite3.connect(self._data / "requests.sqlite3") as store:
            found: tuple[str, str] = store.execute(
                "SELECT id, status FROM models WHERE adapter = ?", [adapter]
            ).fetchone()
            return found
