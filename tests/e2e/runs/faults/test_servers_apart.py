"""Runs use an engine and a router that `vime serve` started separately and that outlive the runs. In another run the
engines change during training: a new engine joins, a separately started engine joins, and the first engine leaves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_cases import KEY, ChangingRun, engines, train_two_adapters, wait_for_line, with_key
from train_fixtures import (
    World,
    launched,
    make_world,
    rows,
    samples,
    vime,
)

from slime.tracking.ledger import read_ledger
from vime.members.table import read_engines
from vime.pool.control import answers
from vime.pool.process import free_port
from vime.pool.router import RouterSpec
from vime.vllm.control import VllmControl
from vime.vllm.router import VllmRouter

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LIMIT = "perf/request/concurrency_limit/mean"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


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
        # The third run uses SGLang's protocol with the engine, through its own sglang-router.
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

        # Each bad input is an error within 15 s of the command: a router that has engines, a wrong key.
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


def test_two_runs_train_adapters_of_one_engine_at_once(world: World, tmp_path: Path) -> None:
    train_two_adapters(world, tmp_path)


@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_engines_join_and_leave_a_run(world: World, transport: str) -> None:
    """No group is lost, not even when the run resumes with its one engine."""
    run = ChangingRun(world, transport)
    run_dir = str(run.run_dir)
    with launched(with_key(vime("train", *run.flags)), run.run_dir.with_suffix(".out")) as launch:
        launch.wait_for(lambda: run.steps() >= 1, "the second step", 280)
        engines("remove", run_dir, "engine-0", refused="the last one")
        engines("add", run_dir)
        run.answer(launch, "engine-0", "engine-1")
        if transport == "disk":
            with run.joined(world.root):
                run.answer(launch, "engine-1", "engine-2")
        else:
            address = f"127.0.0.1:{free_port('127.0.0.1')}"
            engines("add", run_dir, "--address", address, refused="--update-weight-transport nccl")
        assert "its devices are free" in engines("remove", run_dir, "engine-0")
        run.go_on(launch)
        listed = [line.split()[:3] for line in engines("list", run_dir).splitlines()]
        assert listed[1:3] == [["engine-0", "policy", "removed"], ["engine-1", "policy", "serving"]]
        launch.process.send_signal(signal.SIGTERM)
        assert launch.finish(120) == 128 + signal.SIGTERM
        assert "died" not in launch.output and "Traceback" not in launch.output, launch.output[-3000:]
    engines("add", run_dir, refused="whose run has ended")
    limits = {row[LIMIT] for row in rows(run.run_dir, "rollout/step").values()}
    assert {512.0, 1024.0} <= limits, limits

    last = run.steps()
    again = [*run.flags, "--num-rollout", str(last + 3)]
    with launched(vime("train", *again), run.run_dir.with_suffix(".again")) as launch:
        assert launch.finish(280) == 0, launch.output[-3000:]
    assert list(read_engines(run.run_dir).engines) == ["engine-0"]
    run.assert_right_weights()
    ledger = read_ledger(run.run_dir)
    assert ledger.is_exact and ledger.starts == 2 and not ledger.dropped.total()
    assert len(ledger.trained) == last + 3
