"""A connector whose tasks name their faults. It runs in a process of its own, as the connectors of the hubs do."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import time
import urllib.request
from typing import Any

FAULTS: dict[str, Any] = {
    "nan": lambda: math.nan,
    "text": lambda: "good",
    "raise": lambda: 1 / 0,
    "exit": lambda: exit(3),
    "die": lambda: os._exit(3),
    "block": lambda: time.sleep(60),
}


class Connector:
    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        if name == "unknown":
            raise ModuleNotFoundError("No module named 'unknown'")
        if name == "slow":
            time.sleep(60)
        print("text of an environment")
        self.arguments = arguments
        self.child = subprocess.Popen(["sleep", "600"]) if arguments.get("child") else None

    async def load_prompts(self, split: str | None, limit: int | None) -> list[dict[str, Any]]:
        await asyncio.sleep(self.arguments.get("load_s", 0))
        names = list(self.arguments.get("names", []))[:limit]
        prompt = [{"role": "user", "content": "go"}]
        return [{"prompt": prompt, "label": split, "task": name} for name in names]

    async def run_episode(self, base_url: str, api_key: str, model: str, task: str) -> dict[str, Any]:
        print("more text")
        if task == "wait":
            await asyncio.sleep(60)
        if task == "pid":
            return {"reward": float(self.child.pid if self.child else os.getpid()), "metrics": {}}
        if task in FAULTS:
            return {"reward": FAULTS[task](), "metrics": {}}
        body = b'{"model": "%s", "messages": [{"role": "user", "content": "go"}]}' % model.encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        for _ in range(int(task)):
            request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
            await asyncio.to_thread(urllib.request.urlopen, request)
        return {"reward": float(task), "metrics": {"requests": int(task), "note": "no number"}}

    async def close(self) -> None: ...
