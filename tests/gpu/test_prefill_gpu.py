"""A prefill engine on one GPU and a decode engine on another: the answers of one engine that does both.

tests/e2e/engines/test_prefill_engines.py does the same on CPUs. The files of --weight-dir are a connector on GPUs too;
vLLM's own is NIXL, whose package must be there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engine_fixtures import Stack, answered, make_checkpoint, server_of
from safetensors.torch import load_file, save_file

from slime.protocols import GenerateResult
from vime.pool.router import RouterSpec
from vime.vllm.caches.connector import transfer_flags
from vime.vllm.pool import VllmEnginePool

pytestmark = pytest.mark.multi_gpu
PROMPT = [4 + index % 40 for index in range(300)]
CLOSE = 0.1
"""Largest difference of a log-prob in bfloat16, in nats. The other weights change log-probs by more than 1."""


class Pair(Stack):
    """A pool with a prefill engine and a decode engine, each on a GPU."""

    def __init__(self, root: Path, connector: str) -> None:
        super().__init__(root)
        for seed, folder in ((0, self.checkpoint), (1, self.other)):
            make_checkpoint(folder, seed=seed, hidden=256)
            file = folder / "model.safetensors"
            state = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
            save_file(state, file, metadata={"format": "pt"})
        (first,) = (member.spec for member in self.pool._members)
        visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
        memory = ("--gpu-memory-utilization", "0.3", "--enforce-eager")
        specs = []
        for index, role in enumerate(("prefill", "decode")):
            log = str(root / f"engine-{index}.log")
            one = replace(first, index=index, role=role, log_path=log, dtype="bfloat16")
            files = tuple(transfer_flags(one)) if connector == "files" else ()
            env = {"CUDA_VISIBLE_DEVICES": visible[index]}
            specs.append(replace(one, device="cuda", vllm_argv=(*memory, *files), env=env))
        router = RouterSpec(run_key=self.key, log_path=str(root / "router.log"))
        self.pool = VllmEnginePool(specs, router, source=self, health_check_interval_s=5)

    def url(self, role: str) -> str:
        (found,) = (m.control.url for m in self.pool.state.serving_members() if m.spec.role == role)
        return found

    def alone(self) -> GenerateResult:
        """Returns the answer of the decode engine that computes the prompt itself."""
        (decode,) = (m.control for m in self.pool.state.serving_members() if m.spec.role == "decode")
        decode.use_prefill_engines([])
        decode.reset_prefix_cache()
        result = self.greedy()
        decode.reset_prefix_cache()
        self.pool.state.send_prefills()
        return result

    def greedy(self) -> GenerateResult:
        return self.generate(PROMPT, temperature=0.0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["files", "nixl"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if request.param == "nixl" and find_spec("nixl") is None:
        pytest.skip("the package nixl is not there")
    pair = Pair(tmp_path_factory.mktemp("prefill"), request.param)
    pair.pool.start()
    pair.push(pair.checkpoint)
    yield pair
    pair.pool.stop()


def check_equal(pair: Pair) -> None:
    alone = pair.alone()
    before = answered(pair.url("prefill"), pair.key)
    together = pair.greedy()
    assert answered(pair.url("prefill"), pair.key) == before + 1
    assert alone.cached_tokens == 0 and together.cached_tokens >= 256
    assert together.weight_versions == alone.weight_versions == [pair.version]
    pairs = zip(together.token_ids, alone.token_ids, strict=True)
    same = next((index for index, (left, right) in enumerate(pairs) if left != right), 12)
    assert same >= 1, "another token is chosen only where two are about as likely"
    left, right = torch.tensor(together.log_probs[:same]), torch.tensor(alone.log_probs[:same])
    torch.testing.assert_close(left, right, atol=CLOSE, rtol=0)


def wait_for(condition: Callable[[], bool], timeout_s: float = 240) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never came"
        time.sleep(0.1)


def test_two_gpus_answer_as_one_does(pair: Pair) -> None:
    check_equal(pair)
    before = answered(pair.url("prefill"), pair.key)
    prompt = [*PROMPT[:280], 7, 7]
    results = pair.generate_all([prompt] * 6, max_new_tokens=4, ignore_eos=True)
    assert answered(pair.url("prefill"), pair.key) == before + 1, "a group costs one prefill"
    assert all(result.cached_tokens >= 256 for result in results)
    first = pair.greedy()
    pair.push(pair.other)
    check_equal(pair)
    other = pair.greedy()
    assert first.token_ids != other.token_ids


def test_a_killed_prefill_engine_is_replaced_never_run(pair: Pair) -> None:
    url = pair.url("prefill")
    os.kill(server_of(url).pid, signal.SIGKILL)
    assert len(pair.greedy().token_ids) == 12
    wait_for(lambda: len(pair.pool.engine_urls) == 2 and pair.url("prefill") != url)
    check_equal(pair)
