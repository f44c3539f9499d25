"""A weight channel is one class and one entry in the registry: flags, planner, trainer and engines accept a new
channel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_double import DoubleServer, digest

from slime.protocols import WeightUpdate
from slime.weight_sync.channel import Export, TrainerSettings
from slime.weight_sync.publisher import Publisher
from slime.weight_sync.registry import CHANNELS
from vime.pool.router import RouterSpec
from vime.vllm.control import VllmControl
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmSpec

KEY = "added-key"
HERE = Path(__file__).parent


class AddedServer(DoubleServer):
    """A double with the added channel."""

    def command(self) -> list[str]:
        return [*super().command(), "added_channel"]

    def environment(self) -> dict[str, str]:
        """Returns the environment with the script's folder, because servers start without it on the path."""
        env = super().environment()
        return {**env, "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], str(HERE)])}


class Trainer:
    """Publishes through the added channel."""

    def __init__(self, weight_dir: Path) -> None:
        place = TrainerSettings(weight_dir, 1 << 20, torch.device("cpu"), 60)
        self.weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
        self.publisher = Publisher.of("second", place, Export(self.weights.items), compare=False)
        self.thread = ThreadPoolExecutor(1)

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        return self.thread.submit(self.publisher.next, version, receivers)

    def weights_file(self) -> Future[WeightUpdate]:
        raise AssertionError("a file lasts")


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(CHANNELS)
    monkeypatch.syspath_prepend(str(HERE))
    import added_channel

    CHANNELS["second"] = added_channel.CHANNELS["second"]
    yield
    CHANNELS.clear()
    CHANNELS.update(before)


@pytest.mark.slow
def test_engines_load_weights_through_an_added_channel(added: None, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    (weight_dir := tmp_path / "weights").mkdir(mode=0o700)
    trainer, log = Trainer(weight_dir), tmp_path / "engine.log"
    spec = VllmSpec(
        model_path="", run_key=KEY, weight_dir=str(weight_dir), log_path=str(log), start_timeout_s=60
    )
    router = RouterSpec(run_key=KEY, log_path=str(tmp_path / "router.log"))
    pool = VllmEnginePool([spec], router, spawn=AddedServer, source=trainer)

    def held() -> list[dict[str, str]]:
        lines = Path(f"{log}.requests").read_text().splitlines()
        return [json.loads(line.removeprefix("HOLDS ")) for line in lines if line.startswith("HOLDS")]

    wanted = {name: digest(tensor) for name, tensor in trainer.weights.items()}
    try:
        pool.start()
        pool.publish(7)
        assert held() == [wanted]
        assert [file.name for file in weight_dir.iterdir()] == ["second-7"]
        (url,) = pool.engine_urls
        with pytest.raises(OSError):
            VllmControl(url, KEY)._post("/die", {})
        end = time.monotonic() + 60
        while len(held()) < 2:
            assert time.monotonic() < end, "the engine that came back got no weights"
            time.sleep(0.1)
        assert held() == [wanted, wanted]
    finally:
        pool.stop()
        trainer.thread.shutdown()
        dist.destroy_process_group()


def test_flags_help_and_plan_know_an_added_channel() -> None:
    code = """
from slime.weight_sync.registry import CHANNELS, ChannelRecord
CHANNELS["second"] = ChannelRecord(
    "added_channel:SecondFiles", help="through files of another name", plan="second files in {weight_dir}"
)
from slime.rules import resolve
from slime.rules.flags import own_flags
from vime.plan.command import transport
spec = own_flags()["update_weight_transport"]
assert spec.choices == ("disk", "ipc", "nccl", "second", "vllm-nccl"), spec.choices
assert "second: through files of another name" in spec.help
c = resolve({"device": "cpu", "update_weight_transport": "second", "weight_dir": "/w"})
assert transport(c) == "second files in /w (second)", transport(c)
"""
    path = os.pathsep.join([str(HERE), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
