"""Runs against an engine and a router that were started apart by `vime serve`, which outlive the runs. And a run whose
engines change while it trains: one joins, one that was started apart joins, and the first one leaves."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_fixtures import answered
from train_fixtures import (
    PROMPTS,
    SAMPLES,
    Launch,
    World,
    launched,
    make_world,
    published_weights,
    rows,
    samples,
    vime,
)

from slime.tracking.ledger import read_ledger
from vime.members.table import read_fleet
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


def engines(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(vime("engines", *argv), capture_output=True, text=True, timeout=280, check=False)


def url_of(run_dir: Path, name: str) -> str:
    return read_fleet(run_dir).engines[name].address


@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_engines_join_and_leave_a_run(world: World, transport: str) -> None:
    """All that is trained on comes from the present weights, whichever engine made it, and no group is lost."""
    run_dir, checkpoint = world.root / transport, world.root / transport / "checkpoint"
    flags = [
        *world.grpo(transport, rollouts=100_000),
        "--actor-num-gpus-per-node",
        "1",
        "--rollout-num-gpus",
        "1",
    ]
    flags += ["--save", str(checkpoint), "--load", str(checkpoint), "--exit-signal-handler"]
    flags += ["--update-weight-transport", transport, "--vllm-server-concurrency", "auto"]

    def steps() -> int:
        return max(rows(run_dir, "train/step"), default=-1)

    with ExitStack() as stack:
        launch = stack.enter_context(launched(with_key(vime("train", *flags)), run_dir.with_suffix(".out")))

        def go_on(what: str) -> None:
            """Three more steps."""
            last = steps()
            launch.wait_for(lambda: steps() >= last + 3, f"steps after {what}", 120)

        def both_answer(*names: str) -> None:
            before = [answered(url_of(run_dir, name), KEY) for name in names]
            go_on("a count")
            after = [answered(url_of(run_dir, name), KEY) for name in names]
            assert all(b < a for b, a in zip(before, after, strict=True)), (names, before, after)

        launch.wait_for(lambda: steps() >= 1, "the second step", 240)
        refused = engines("remove", str(run_dir), "engine-0")
        assert (refused.returncode, "the last one" in refused.stderr) == (2, True), refused
        added = engines("add", str(run_dir))
        assert added.returncode == 0, added
        both_answer("engine-0", "engine-1")
        joined = steps()
        served = ["127.0.0.1:" + str(free_port("127.0.0.1")), *flags]
        apart = engines("add", str(run_dir), "--address", served[0])
        assert apart.returncode == 2, apart
        if transport == "nccl":
            assert "--update-weight-transport nccl" in apart.stderr
        else:
            assert f"must answer at {served[0]}" in apart.stderr
            served += [
                "--weight-dir",
                str(published_weights(run_dir)),
                "--run-dir",
                str(world.root / "apart"),
            ]
            serving = stack.enter_context(
                launched(with_key(vime("serve", "engine", *served)), world.root / "apart.out")
            )
            serving.wait_for(lambda: "engine serves at" in serving.output, "the engine apart", 240)
            apart = engines("add", str(run_dir), "--address", served[0])
            assert apart.returncode == 0, apart
            both_answer("engine-1", "engine-2")
            assert engines("remove", str(run_dir), served[0]).returncode == 0
            assert VllmControl(f"http://{served[0]}", KEY).is_healthy(30)
        removed = engines("remove", str(run_dir), "engine-0")
        assert (removed.returncode, "its place is free" in removed.stdout) == (0, True), removed
        go_on("the first engine has left")
        listed = engines("list", str(run_dir)).stdout.splitlines()
        assert [line.split()[:3] for line in listed[1:]][:2] == [
            ["engine-0", "policy", "removed"],
            ["engine-1", "policy", "serving"],
        ]
        launch.process.send_signal(signal.SIGTERM)
        assert launch.finish(120) == 128 + signal.SIGTERM
        assert "died" not in launch.output and "Traceback" not in launch.output, launch.output[-3000:]
    last = steps()
    assert sorted(rows(run_dir, "train/step")) == list(range(last + 1)) and joined < last
    for step, row in rows(run_dir, "train/step").items():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5, (step, row)
        drawn = samples(run_dir, step)
        assert len(drawn) == PROMPTS * SAMPLES and all(s["weight_versions"] == [step] for s in drawn), step
    limits = {row["rollout/request/concurrency_limit/mean"] for row in rows(run_dir, "rollout/step").values()}
    assert {512.0, 1024.0} <= limits, limits
    ended = engines("add", str(run_dir))
    assert (ended.returncode, "whose run has ended" in ended.stderr) == (2, True), ended

    again = [*flags, "--num-rollout", str(last + 2)]
    with launched(vime("train", *again), run_dir.with_suffix(".again")) as launch:
        assert launch.finish(240) == 0, launch.output[-3000:]
    assert list(read_fleet(run_dir).engines) == ["engine-0"], "a run that resumes has its configured engines"
    ledger = read_ledger(run_dir)
    assert (
        ledger.is_exact
        and ledger.starts == 2
        and not ledger.dropped.total()
        and len(ledger.trained) == last + 2
    )
    assert re.search(r'"kind": "engine".*"state": "removed"', (run_dir / "events.jsonl").read_text())
    assert json.loads((run_dir / "config.json").read_text())["cluster"]["rollout_num_gpus"] == 1
