"""A service in a process of its own, and unmodified clients for it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import httpx
import tinker
from tinker import types

STEP = types.AdamParams(learning_rate=1e-2)


class ServiceProcess:
    """Runs `vime service` on the tiny model. After `kill`, `start` serves the same data at the same address."""

    def __init__(self, root: Path, base: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.root, self.data, self.url = root, root / "data", f"http://127.0.0.1:{self.port}"
        flags = {"base": base, "name": "tiny", "data": self.data, "tenants": "alice,bob", "port": self.port}
        flags |= {"tokens-per-sequence": 256, "rank": 8, "adapters": 2, "snapshot-seconds": 1000}
        self._command = [sys.executable, "-m", "vime", "service"]
        self._command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        self._process: subprocess.Popen[str] | None = None
        self._keys: dict[str, str] = {}

    @property
    def log(self) -> Path:
        return self.root / "service.log"

    def start(self) -> ServiceProcess:
        with self.log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("key of "):
                self._keys[line.split()[2].rstrip(",")] = line.split()[-1]
            if line.startswith("serving "):
                return self
        raise AssertionError(self.log.read_text())

    def kill(self) -> None:
        """Ends the process as `kill -9` does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def key(self, tenant: str) -> str:
        return self._keys[tenant]

    def client(self, tenant: str) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=self.key(tenant))

    def post(self, tenant: str, route: str, /, **body: object) -> httpx.Response:
        """Sends a request as the client does, without its retries."""
        headers = {"X-API-Key": self.key(tenant)}
        return httpx.post(f"{self.url}/api/v1/{route}", json=body, headers=headers, timeout=60)


def make_trainer(client: tinker.ServiceClient, seed: int = 1) -> tinker.TrainingClient:
    return client.create_lora_training_client(
        base_model="tiny", rank=8, seed=seed, train_unembed=False
    ).result()


def make_datum(text: str) -> types.Datum:
    ids = list(text.encode())
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def train(trainer: tinker.TrainingClient, data: list[types.Datum], steps: int) -> list[float]:
    """Returns every step's loss."""
    losses = []
    for _ in range(steps):
        done, stepped = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(STEP)
        losses.append(done.result().metrics["loss:sum"])
        stepped.result()
    return losses
