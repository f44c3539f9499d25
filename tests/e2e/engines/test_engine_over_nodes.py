"""Tests one real engine over two "nodes": two processes at two loopback addresses, each with one tensor-parallel
worker.

The tests share the engine and run in the order of the file; the last test ends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from engine_fixtures import Stack, hf_log_probs
from process_names import command_line

from vime.pool.nodes_server import NodesServer
from vime.pool.router import RouterSpec
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmServer, VllmSpec

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PROMPT = [14, 5, 8, 13, 21, 30]
HOSTS = ("127.0.0.1", "127.0.0.2")


def on_two_addresses(spec: VllmSpec) -> NodesServer:
    return NodesServer(
        [
            VllmServer(
                replace(
                    spec,
                    nodes=2,
                    node=node,
                    host=host,
                    log_path=spec.log_path.replace(".log", f"-{node}.log"),
                )
            )
            for node, host in enumerate(HOSTS)
        ]
    )


class TwoNodes(Stack):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        spec = VllmSpec(
            model_path=str(self.checkpoint),
            run_key=self.key,
            log_path=str(root / "engine.log"),
            weight_dir=str(self.weight_dir),
            tensor_parallel_size=2,
            cpu_threads=1,
            start_timeout_s=500,
            vllm_argv=(f"--kv-cache-memory-bytes={100 << 20}",),
        )
        router = RouterSpec(run_key=self.key, log_path=str(root / "router.log"))
        self.pool = VllmEnginePool(
            [spec], router, spawn=on_two_addresses, source=self, max_restarts=0, health_check_interval_s=5
        )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    stack = TwoNodes(tmp_path_factory.mktemp("engine"))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    stack.pool.start()
    started = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    yield stack
    stack.pool.stop()
    assert psutil.wait_procs(started, timeout=15)[1] == []
    assert [p for p in psutil.Process().children(recursive=True) if p.pid not in before] == []


def log_probs_agree(stack: TwoNodes, checkpoint: Path) -> None:
    answer = stack.generate(PROMPT, seed=3, max_new_tokens=12, deadline_s=120)
    expected = hf_log_probs(checkpoint, PROMPT, answer.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)


def test_log_probs_are_those_of_transformers(stack: TwoNodes) -> None:
    log_probs_agree(stack, stack.checkpoint)


def test_a_file_reaches_the_workers_of_both_nodes(stack: TwoNodes) -> None:
    """Each worker compares its tensors with the file; the answers come from the new weights."""
    stack.push(stack.other, checksums=True)
    log_probs_agree(stack, stack.other)


def test_the_loss_of_the_second_node_is_the_loss_of_the_engine(stack: TwoNodes) -> None:
    (second,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if command_line(process).split()[1:4] == ["-m", "vime.vllm.serve", "vime.vllm.headless"]
    )
    second.kill()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            stack.pool.check_health()
        except RuntimeError as error:
            assert (
                "the server process of node 2 of 2 of the engine ended with exit status 137, from SIGKILL"
                in str(error)
            )
            return
        time.sleep(0.1)
    pytest.fail("nobody noticed")
