"""Cases of engines and routers that `vime serve` started separately, and of engines that join and leave a run. Tests on
CPUs and on GPUs share them."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from engine_fixtures import answered
from fault_cases import KINDS
from train_fixtures import PROMPTS, SAMPLES, Launch, World, launched, published_weights, rows, samples, vime

from vime.members.table import read_engines
from vime.pool.control import request
from vime.pool.process import free_port
from vime.vllm.client import VllmEngineClient
from vime.vllm.control import VllmControl

KEY = secrets.token_hex(32)
TOLERANCES = {"cpu": (1e-5, 1e-5, 1e-6), "cuda": (0.02, 0.5, 0.05)}
"""Device -> largest differences in nats: between the log-probs of trainer and engine in the mean and for one token, and
between two answers of an engine."""


def of_device(world: World) -> tuple[str, ...]:
    """Returns flags for the memory of a tiny model on a GPU."""
    return KINDS["cuda"].flags if world.device == "cuda" else ()


def on_gpu(world: World, number: int) -> dict[str, str]:
    """Returns the variable that shows a process one GPU only."""
    return {"CUDA_VISIBLE_DEVICES": str(number)} if world.device == "cuda" else {}


def with_key(command: list[str], **variables: str) -> list[str]:
    """Returns the command with the key and `variables` in its environment. `Launch` removes this project's variables
    from the environment."""
    return ["env", f"VIME_RUN_KEY={KEY}", *(f"{name}={value}" for name, value in variables.items()), *command]


def wait_for_line(launch: Launch, line: str) -> None:
    launch.wait_for(lambda: line in launch.output, line, 240)


def train_two_adapters(world: World, root: Path) -> None:
    """Two runs train adapters of one engine at the same time. The base is loaded once. Each run samples from its own
    adapter, which the engine may update at any time. Versions and answers of the runs stay separate."""
    weights, port = root / "weights", free_port("127.0.0.1")
    apart = ["--rollout-external-engine-addrs", f"127.0.0.1:{port}", "--weight-dir", str(weights)]
    apart += ["--actor-num-gpus-per-node", "1", *of_device(world)]
    lora = ["--lora-rank", "8", "--lora-alpha", "16", "--lr", "1e-2"]
    served = [f"127.0.0.1:{port}", *world.grpo("served", rollouts=1), *apart, *lora, "--vllm-max-loras", "2"]
    rollouts, (_, largest, repeated) = {"maths": 3, "code": 5}, TOLERANCES[world.device]
    with ExitStack() as stack:
        command = with_key(vime("serve", "engine", *served), **on_gpu(world, 1))
        wait_for_line(
            stack.enter_context(launched(command, root / "engine.log")), "engine serves at 127.0.0.1"
        )
        runs = []
        for name, number in rollouts.items():
            more = ["--lora-name", name, "--seed", str(number), "--check-weight-update-equal"]
            train = vime("train", *world.grpo(name, rollouts=number), *apart, *lora, *more)
            command = with_key(train, **on_gpu(world, 0))
            runs.append(stack.enter_context(launched(command, root / f"{name}.out")))
        for launch in runs:
            assert launch.process.wait(280) == 0, launch.output[-3000:]
        for name, number in rollouts.items():
            steps = rows(world.root / name, "train/step")
            assert sorted(steps) == list(range(number))
            for step, row in steps.items():
                assert row["train/train_rollout_logprob_abs_diff_max"] < largest, (name, step)
                versions = {tuple(one["weight_versions"]) for one in samples(world.root / name, step)}
                assert versions == {(step,)}, (name, step)
            assert VllmControl(f"http://127.0.0.1:{port}", KEY, name).weight_version() == number
        assert VllmControl(f"http://127.0.0.1:{port}", KEY, "third").weight_version() == -1
        asyncio.run(check_answers(f"http://127.0.0.1:{port}", repeated))


async def check_answers(url: str, tolerance: float) -> None:
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
        assert found == pytest.approx(scores[name].tolist(), abs=tolerance), name
        body = {"model": name or "policy", "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        _, answer = await asyncio.to_thread(request, url, KEY, "POST", "/v1/completions", body, timeout_s=60)
        listed = json.loads(answer)["choices"][0]["prompt_logprobs"][1:]
        found = [place[str(token)]["logprob"] for token, place in zip(tokens[1:], listed, strict=True)]
        assert found == pytest.approx(scores[name].tolist(), abs=tolerance), name
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
        self.run_dir = world.root / transport
        checkpoint = str(self.run_dir / "checkpoint")
        self.flags = [
            *world.grpo(transport, rollouts=100_000),
            *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
            *("--save", checkpoint, "--load", checkpoint, "--exit-signal-handler"),
            *("--update-weight-transport", transport, "--vllm-server-concurrency", "auto"),
            *of_device(world),
        ]
        self.tolerance, self.engines_gpu = TOLERANCES[world.device][0], on_gpu(world, 1)

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

    @contextmanager
    def joined(self, root: Path) -> Iterator[None]:
        """Starts an engine with `vime serve` that joins the run. At the end of the block it leaves the run, and still
        serves."""
        run_dir, address = str(self.run_dir), f"127.0.0.1:{free_port('127.0.0.1')}"
        engines("add", run_dir, "--address", address, refused=f"must answer at {address}")
        own = ["--weight-dir", str(published_weights(self.run_dir)), "--run-dir", str(root / "apart")]
        command = with_key(vime("serve", "engine", address, *self.flags, *own), **self.engines_gpu)
        with launched(command, root / "apart.out") as serving:
            wait_for_line(serving, "engine serves at 127.0.0.1")
            engines("add", run_dir, "--address", address)
            yield
            engines("remove", run_dir, address)
            assert VllmControl(f"http://{address}", KEY).is_healthy(30)

    def assert_right_weights(self) -> None:
        """Checks that all trained samples come from the weights of their step, from every engine."""
        trained = rows(self.run_dir, "train/step")
        assert sorted(trained) == list(range(len(trained)))
        for step, row in trained.items():
            assert row["train/train_rollout_logprob_abs_diff"] < self.tolerance, (step, row)
            drawn = samples(self.run_dir, step)
            assert len(drawn) == PROMPTS * SAMPLES and all(s["weight_versions"] == [step] for s in drawn)
