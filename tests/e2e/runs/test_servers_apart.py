"""Runs against an engine and a router that were started apart by `vime serve`. Both outlive the runs."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from train_fixtures import Launch, World, launched, make_world, rows, samples, vime

from vime.pool.control import answers
from vime.pool.process import free_port
from vime.pool.router import RouterSpec
from vime.vllm.control import VllmControl
from vime.vllm.router import VllmRouter

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
KEY = secrets.token_hex(32)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def with_key(command: list[str]) -> list[str]:
    """The command with the key in its environment, which `Launch` gives no variable of this project."""
    return ["env", f"VIME_RUN_KEY={KEY}", *command]


def wait_for_line(launch: Launch, line: str) -> None:
    launch.wait_for(lambda: line in launch.output, line, 240)


def test_two_runs_with_an_engine_and_a_router_of_their_own(world: World, tmp_path: Path) -> None:
    weights, engine, router = tmp_path / "weights", free_port("127.0.0.1"), free_port("127.0.0.1")
    apart = ["--rollout-external-engine-addrs", f"127.0.0.1:{engine}", "--weight-dir", str(weights)]
    apart += ["--actor-num-gpus-per-node", "1"]
    through = ["--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(router)]
    with ExitStack() as stack:
        served = []
        for kind, port in (("engine", engine), ("router", router)):
            flags = [kind, f"127.0.0.1:{port}", *world.grpo("served", rollouts=1), *apart]
            served.append(
                stack.enter_context(launched(with_key(vime("serve", *flags)), tmp_path / f"{kind}.log"))
            )
        for kind, launch in zip(("engine", "router"), served, strict=True):
            wait_for_line(launch, f"{kind} serves at 127.0.0.1")
        control = VllmControl(f"http://127.0.0.1:{engine}", KEY)
        assert control.weight_version() == -1
        # The third run speaks SGLang's protocol to the engine, through a sglang-router of its own.
        for number, more in enumerate((through, [], ["--rollout-backend", "sglang"])):
            run = [*world.grpo(f"run{number}", rollouts=2), *apart, *more]
            with launched(with_key(vime("train", *run)), tmp_path / f"run{number}.out") as launch:
                assert launch.process.wait(240) == 0, launch.output[-3000:]
            assert list(rows(world.root / f"run{number}", "rollout/step")) == [0, 1]
            versions = {tuple(one["weight_versions"]) for one in samples(world.root / f"run{number}", 1)}
            assert versions == {(1,)}
            assert control.is_healthy(30) and control.weight_version() == 2
        listed = VllmRouter(
            RouterSpec(run_key=KEY, log_path="", host="127.0.0.1", port=router, gateway_host="127.0.0.1")
        )
        assert listed.engines() == [], "the run has taken its engine out"
        first, *others = ([one["tokens"] for one in samples(world.root / f"run{n}", 0)] for n in range(3))
        assert others == [first, first]

        # Bad input, each within 15 s of the command: a router with engines, a wrong key.
        listed.add(control.url)
        run = [*world.grpo("bad", rollouts=2), *apart]
        for name, command, said in (
            ("busy", with_key(vime("train", *run, *through)), "must have no engines yet, got 1"),
            (
                "key",
                ["env", "VIME_RUN_KEY=" + 64 * "0", *vime("train", *run)],
                "must take the key in VIME_RUN_KEY",
            ),
        ):
            began = time.monotonic()
            with launched(command, tmp_path / f"{name}.out") as launch:
                assert launch.process.wait(60) == 2
            assert said in launch.output and time.monotonic() - began < 15 * (os.cpu_count() or 1)
        assert answers(control.url, KEY, "/health", timeout_s=30)
