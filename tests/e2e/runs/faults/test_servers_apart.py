"""Runs use an engine and a router that `vime serve` started separately and that outlive the runs. In another run the
engines change during training: a new engine joins, a separately started engine joins, and the first engine leaves."""

from __future__ import annotations

import asyncio
import json
import os
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
from vime.members.table import read_engines
from vime.pool.control import answers, request
from vime.pool.process import free_port
from vime.pool.router import RouterSpec
from vime.vllm.client import VllmEngineClient
from vime.vllm.control import VllmControl
from vime.vllm.router import VllmRouter

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
KEY = secrets.token_hex(32)
LIMIT = "perf/request/concurrency_limit/mean"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def with_key(command: list[str]) -> list[str]:
    """Returns the command with the key in its environment. `Launch` removes this project's variables from the
    environment."""
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
    """The base is loaded once. Each run samples from its own adapter, which the engine may update at any time.
    Versions and answers of the runs stay separate."""
    weights, port = tmp_path / "weights", free_port("127.0.0.1")
    apart = ["--rollout-external-engine-addrs", f"127.0.0.1:{port}", "--weight-dir", str(weights)]
    apart += ["--actor-num-gpus-per-node", "1"]
    lora = ["--lora-rank", "8", "--lora-alpha", "16", "--lr", "1e-2"]
    served = [f"127.0.0.1:{port}", *world.grpo("served", rollouts=1), *apart, *lora, "--vllm-max-loras", "2"]
    rollouts = {"maths": 3, "code": 5}
    with ExitStack() as stack:
        engine = launched(with_key(vime("serve", "engine", *served)), tmp_path / "engine.log")
        wait_for_line(stack.enter_context(engine), "engine serves at 127.0.0.1")
        runs = []
        for name, number in rollouts.items():
            more = ["--lora-name", name, "--seed", str(number), "--check-weight-update-equal"]
            command = vime("train", *world.grpo(name, rollouts=number), *apart, *lora, *more)
            runs.append(stack.enter_context(launched(with_key(command), tmp_path / f"{name}.out")))
        for launch in runs:
            assert launch.process.wait(280) == 0, launch.output[-3000:]
        for name, number in rollouts.items():
            steps = rows(world.root / name, "train/step")
            assert sorted(steps) == list(range(number))
            for step, row in steps.items():
                assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-5, (name, step)
                versions = {tuple(one["weight_versions"]) for one in samples(world.root / name, step)}
                assert versions == {(step,)}, (name, step)
            assert VllmControl(f"http://127.0.0.1:{port}", KEY, name).weight_version() == number
        assert VllmControl(f"http://127.0.0.1:{port}", KEY, "third").weight_version() == -1
        asyncio.run(check_answers(f"http://127.0.0.1:{port}"))


async def check_answers(url: str) -> None:
    """Checks the answers of the base and of two adapters, with each way to name them. The engine has no other
    requests."""
    tokens = list(range(5, 17))
    scores = {}
    for name in ("", "maths", "code"):
        client = VllmEngineClient(url, KEY, name)
        scores[name] = (await client.score(tokens, start=1, deadline_s=60)).log_probs
        theirs = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
        theirs |= {"logprob_start_len": 0} | ({"lora_path": name} if name else {})
        _, answer = await asyncio.to_thread(request, url, KEY, "POST", "/generate", theirs, timeout_s=60)
        found = [row[0] for row in json.loads(answer)["meta_info"]["input_token_logprobs"][1:]]
        assert found == pytest.approx(scores[name].tolist(), abs=1e-6), name
        body = {"model": name or "policy", "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        _, answer = await asyncio.to_thread(request, url, KEY, "POST", "/v1/completions", body, timeout_s=60)
        listed = json.loads(answer)["choices"][0]["prompt_logprobs"][1:]
        found = [place[str(token)]["logprob"] for token, place in zip(tokens[1:], listed, strict=True)]
        assert found == pytest.approx(scores[name].tolist(), abs=1e-6), name
        await client.close()
    for one, other in (("", "maths"), ("", "code"), ("maths", "code")):
        assert abs(scores[one] - scores[other]).max() > 1e-3, (one, other)
    client = VllmEngineClient(url, KEY, "third")
    with pytest.raises(ValueError, match="got third; it has code, maths"):
        await client.score(tokens, start=1, deadline_s=60)
    await client.close()


def engines(*argv: str, refused: str = "") -> str:
    """Returns the output of `vime engines`. With `refused`, the command must fail with this part of an error."""
    done = subprocess.run(vime("engines", *argv), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == (2 if refused else 0) and refused in done.stderr, done
    return done.stdout


class ChangingRun:
    """A run with one trainer and one engine, and the actions of its tests."""

    def __init__(self, world: World, transport: str) -> None:
        self.run_dir, self.transport = world.root / transport, transport
        checkpoint = str(self.run_dir / "checkpoint")
        self.flags = [
            *world.grpo(transport, rollouts=100_000),
            *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
            *("--save", checkpoint, "--load", checkpoint, "--exit-signal-handler"),
            *("--update-weight-transport", transport, "--vllm-server-concurrency", "auto"),
        ]

    def steps(self) -> int:
        return max(rows(self.run_dir, "train/step"), default=-1)

    def go_on(self, launch: Launch) -> None:
        """Waits for three more steps."""
        last = self.steps()
        launch.wait_for(lambda: self.steps() >= last + 3, "three more steps", 240)

    def answer(self, launch: Launch, *names: str) -> None:
        """Checks that each named engine answers requests of the next steps."""
        urls = [read_engines(self.run_dir).engines[name].address for name in names]
        before = [answered(url, KEY) for url in urls]
        self.go_on(launch)
        after = [answered(url, KEY) for url in urls]
        assert all(b < a for b, a in zip(before, after, strict=True)), (names, before, after)

    def take_in(self, launch: Launch, root: Path) -> None:
        """Starts an engine with `vime serve`, which joins the run and leaves it."""
        run_dir = str(self.run_dir)
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        if self.transport == "nccl":
            engines("add", run_dir, "--address", address, refused="--update-weight-transport nccl")
            return
        engines("add", run_dir, "--address", address, refused=f"must answer at {address}")
        own = ["--weight-dir", str(published_weights(self.run_dir)), "--run-dir", str(root / "apart")]
        command = with_key(vime("serve", "engine", address, *self.flags, *own))
        with launched(command, root / "apart.out") as serving:
            wait_for_line(serving, "engine serves at 127.0.0.1")
            engines("add", run_dir, "--address", address)
            self.answer(launch, "engine-1", "engine-2")
            engines("remove", run_dir, address)
            assert VllmControl(f"http://{address}", KEY).is_healthy(30)

    def assert_right_weights(self) -> None:
        """Checks that all trained samples come from the weights of their step, from every engine."""
        trained = rows(self.run_dir, "train/step")
        assert sorted(trained) == list(range(len(trained)))
        for step, row in trained.items():
            assert row["train/train_rollout_logprob_abs_diff"] < 1e-5, (step, row)
            drawn = samples(self.run_dir, step)
            assert len(drawn) == PROMPTS * SAMPLES and all(s["weight_versions"] == [step] for s in drawn)


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
        run.take_in(launch, world.root)
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
