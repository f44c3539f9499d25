"""Provides model, data and hooks for whole runs of `vime train`, and functions that read a run's output.

The runs use hooks of this module by dotted path (`train_fixtures.parity_reward`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM
from types import ModuleType
from typing import Any, ClassVar

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES = 8, 4
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_SCORED: Counter[tuple[int, int]] = Counter()
"""Number of samples per weight version and group that striking_reward has scored. One process computes all rewards."""
_SCORING = threading.Lock()
"""Lock for the counts, because each reward runs in its own thread."""


def parity_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """Returns 1 if the first token of the response is odd. It varies within most groups of an untrained model, but
    not in all."""
    return float(sample.tokens[-sample.response_length] % 2)


def striking_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """Computes parity_reward, and once sends the signal of the file `strike` ("PID SIGNAL") during a rollout, when at
    least two groups are scored and at least two are not. It then renames the file to `struck` and writes the
    rollout's number into it.

    A test cannot do this from outside, because a rollout of a tiny model may end before the signal is sent. Whole
    groups are counted: without a complete group, the run would correctly end at its deadline.
    """
    order, version = Path(args.run_dir) / "strike", sample.weight_versions[-1]
    with _SCORING:
        _SCORED[version, sample.group_index] += 1
        whole = sum(of == version and count >= SAMPLES for (of, _), count in _SCORED.items())
        if 2 <= whole <= PROMPTS - 2 and order.exists():
            os.kill(*map(int, order.read_text().split()))
            order.write_text(str(version))
            order.rename(order.with_name("struck"))
    return parity_reward(args, sample)


async def uneven_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generates long responses for every third group, so that they still run when other groups fill the batch."""
    from slime.rollout.generate import generate

    return await generate(
        args, sample, sampling_params | {"max_new_tokens": 4 if sample.group_index % 3 else 100}
    )


async def full_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generates responses of the largest length, which no end-of-text token ends."""
    from slime.rollout.generate import generate

    return await generate(args, sample, sampling_params | {"ignore_eos": True})


def note_experts(args: Any, sample: Any) -> Any:
    """Records the tokens and a digest of their experts after each rollout of a response (a sample hook)."""
    rows = sample.rollout_routed_experts
    if rows is not None:
        sample.metadata.setdefault("parts", []).append(
            [len(sample.tokens), hashlib.sha256(rows.tobytes()).hexdigest()]
        )
    return sample


def broken_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    if sample.index == 5:
        raise KeyError("no such answer")
    return 0.0


def script(name: str) -> ModuleType:
    """Imports scripts/{name}.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    return module


class World:
    """A folder with the model, the prompt files and the runs made with them.

    `arch`: a model of scripts/architectures.py other than the default. The default on a GPU has 48 M parameters in
    bf16, with heads of 128 as in real models and with compiled kernels. `dtype` replaces the model's dtype.
    """

    def __init__(
        self, root: Path, device: str = "cpu", arch: str | None = None, dtype: str | None = None
    ) -> None:
        self.root, self.device = root, device
        if arch is None and device == "cuda":
            arch = "qwen3-50m"
        if arch is not None:
            more = ["--dtype", dtype] if dtype else []
            script("make_model").main(
                ["--arch", arch, "--random", "--arithmetic", *more, str(root / "model")]
            )
            self.model, self.data = root / "model", root / "model" / "arithmetic"
        else:
            script("make_tiny_model").main([str(root / "tiny")])
            self.model, self.data = root / "tiny" / "base", root / "tiny"
        self.eval_config = root / "eval.yaml"
        test = str(self.data / "test.jsonl")
        datasets = {
            "greedy": {"path": f"{test}@[0:6]", "temperature": 0.0, "max_response_len": 3},
            "sampled": {"path": f"{test}@[6:10]", "n_samples_per_eval_prompt": 2, "max_response_len": 5},
        }
        self.eval_config.write_text(yaml.safe_dump({"datasets": datasets}))

    def grpo(self, name: str, *, rollouts: int, reward: str = "parity_reward") -> list[str]:
        """Returns the flags of a small GRPO run in `root/name`, without placement."""
        return [
            *("--hf-checkpoint", str(self.model), "--run-dir", str(self.root / name)),
            *(("--device", "cuda") if self.device == "cuda" else ()),
            *("--prompt-data", str(self.data / "train.jsonl"), "--rollout-shuffle"),
            *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template"),
            *("--custom-rm-path", f"train_fixtures.{reward}", "--num-rollout", str(rollouts)),
            *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES)),
            *("--global-batch-size", str(PROMPTS * SAMPLES), "--rollout-max-response-len", "8"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "256", "--lr", "1e-3"),
            *("--save-debug-rollout-data", str(self.root / name / "samples" / "{rollout_id}.pt")),
        ]

    def sft(self, name: str, *, rollouts: int) -> list[str]:
        return [
            *("--hf-checkpoint", str(self.model), "--run-dir", str(self.root / name)),
            *(("--device", "cuda") if self.device == "cuda" else ()),
            *("--prompt-data", str(self.data / "sft.jsonl"), "--input-key", "messages"),
            *(
                "--loss-type",
                "sft_loss",
                "--rollout-function-path",
                "slime.rollout.sft_rollout.generate_rollout",
            ),
            *("--debug-train-only", "--disable-compute-advantages-and-returns", "--calculate-per-token-loss"),
            *("--num-rollout", str(rollouts), "--rollout-batch-size", "64", "--global-batch-size", "64"),
            *(
                "--use-dynamic-batch-size",
                "--max-tokens-per-gpu",
                "2048",
                "--lr",
                "3e-3",
                "--rollout-shuffle",
            ),
            *("--actor-num-gpus-per-node", "1"),
        ]


class Launch:
    """A started command: its output, and every process that it starts.

    Ray's workers rename themselves and outlive a killed parent, so neither command lines nor process groups find them
    all. The test process is therefore the reaper of orphans (see `launched`): remaining processes become its
    descendants. The descendants of another command that runs belong to that command.
    """

    _all: ClassVar[list[Launch]] = []

    def __init__(self, command: list[str], output: Path) -> None:
        # If a script starts the tests in the background, they ignore Ctrl-C, and their child processes would too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}
        self._output = output
        output.parent.mkdir(parents=True, exist_ok=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VIME_"))}
        here = [str(ROOT), str(Path(__file__).parent)]
        env["PYTHONPATH"] = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a new process group, as in a terminal: Ctrl-C reaches the whole group
            )
        self._all.append(self)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def left(self) -> dict[int, str]:
        """Returns pid -> command line of the running processes of this command, with the command itself."""
        found = {}
        not_ours = set(self._before)
        for other in self._all:
            if other is not self and other.process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    below = psutil.Process(other.process.pid).children(recursive=True)
                    not_ours |= {other.process.pid, *(process.pid for process in below)}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.pid in not_ours:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())[:200]
                elif process.pid != self.process.pid:  # Popen reaps the other process
                    os.waitpid(process.pid, os.WNOHANG)
        return found

    def sockets(self) -> list[tuple[str, str, int]]:
        """Returns (command line, address, port) for each socket that accepts data: listening TCP, and UDP without a
        peer."""
        found = []
        for pid, command in self.left().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                for socket in psutil.Process(pid).net_connections(kind="inet"):
                    if socket.status == psutil.CONN_LISTEN or (
                        socket.type == SOCK_DGRAM and not socket.raddr
                    ):
                        found.append((command, socket.laddr.ip, socket.laddr.port))
        return found

    def find(self, pattern: str) -> list[int]:
        return sorted(pid for pid, command in self.left().items() if re.search(pattern, command))

    def finish(self, timeout_s: float) -> int:
        """Waits for the end and returns the command's exit code. All of its processes must have ended 10 s later."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.clean_up()
            raise AssertionError(f"no end within {timeout_s} s:\n{self.output[-3000:]}") from None
        self.await_gone(10)
        return code

    def await_gone(self, timeout_s: float) -> float:
        """Waits until no process of the command is left, and returns the seconds."""
        began = time.monotonic()
        while left := self.left():
            if time.monotonic() - began > timeout_s:
                self.clean_up()
                raise AssertionError(f"left after {timeout_s} s: {left}")
            time.sleep(0.1)
        return time.monotonic() - began

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
        """Waits for the first true value of `condition` while the command runs, and returns it."""
        end = time.monotonic() + timeout_s
        while not (value := condition()):
            code = self.process.poll()
            assert code is None, f"ended with {code} before {what}:\n{self.output[-3000:]}"
            if time.monotonic() > end:
                self.clean_up()
                raise AssertionError(f"no {what} within {timeout_s} s:\n{self.output[-3000:]}")
            time.sleep(0.02)
        return value

    def clean_up(self) -> None:
        """Sends SIGKILL to the remaining processes, by id."""
        while left := self.left():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.1)


@contextlib.contextmanager
def launched(command: list[str], output: Path) -> Iterator[Launch]:
    """Starts a command, and kills it at the end with all processes that it started."""
    with reaper_of_orphans():
        launch = Launch(command, output)
        try:
            yield launch
        finally:
            launch.clean_up()


LISTENING = (
    *("vime train", "gcs/gcs_server", "raylet/raylet", "ray::RuntimeEnvAgent"),
    *("ray::TrainerActor", "ray::RolloutActor"),
    *(r"vllm\.entrypoints", "VLLM::EngineCore", r"vime\.vllm\.router_main"),
)
"""Patterns for the command lines of a colocated run's listening processes."""


def assert_on_loopback(sockets: list[tuple[str, str, int]]) -> None:
    """Checks that no other host can reach a process or port of a run on one host."""
    for pattern in LISTENING:
        assert any(re.search(pattern, command) for command, *_ in sockets), (pattern, sockets)
    for command, address, port in sockets:
        ip = ipaddress.ip_address(address)
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, (command, address, port)


def assert_small(launch: Launch) -> None:
    """Checks that the driver has loaded no large library, and that a small agent replaces Ray's dashboard agent."""
    files = Path(f"/proc/{launch.process.pid}/maps").read_text()
    # The path leaves out torch's libgomp, which vLLM preloads for the children of a process that had an engine.
    for library in ("/torch/lib/libtorch", "/pandas/", "/tokenizers/"):
        assert library not in files, f"the driver has loaded {library}"
    assert launch.find("quiet_agent") and not launch.find("DashboardAgent")


def other_interface() -> str | None:
    """Returns an interface of this host with an IPv4 address that is not loopback."""
    up = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == AF_INET and up[name].isup and not address.address.startswith("127."):
                return name
    return None


def vime(*argv: str) -> list[str]:
    return [sys.executable, "-m", "vime", *argv]


def run(command: list[str], output: Path, *, timeout_s: float = 240) -> str:
    """Runs a command to its end and returns its output. The exit code must be 0."""
    with launched(command, output) as launch:
        code = launch.finish(timeout_s)
        assert code == 0, launch.output[-3000:]
        return launch.output


@contextlib.contextmanager
def reaper_of_orphans() -> Iterator[None]:
    """Orphans among this process's descendants become its children, and not those of process 1."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def rows(run_dir: Path, key: str) -> dict[int, dict[str, float]]:
    """Returns step -> metrics with this step key, from metrics.jsonl. A step may have several lines, but a metric has
    one value. If the run still writes, the last line counts once it is complete."""
    path = run_dir / "metrics.jsonl"
    found: dict[int, dict[str, float]] = {}
    for line in path.read_text().split("\n")[:-1] if path.exists() else []:
        row = json.loads(line)
        if row["step_key"] == key:
            step = found.setdefault(row["step"], {})
            twice = (step.keys() & row.keys()) - {"step_key", "step", "time"}
            assert not twice, f"{twice} of step {row['step']} of {key} twice in {path}"
            step.update(row)
    return found


def samples(run_dir: Path, rollout_id: int | str) -> list[dict[str, Any]]:
    """Returns the samples that --save-debug-rollout-data saved."""
    import torch  # the import is here, because the driver of a run imports this module for its hooks

    return torch.load(run_dir / "samples" / f"{rollout_id}.pt", weights_only=True)["samples"]


def published_weights(run_dir: Path) -> Path:
    """Returns the directory of the run's published weights, which is in shared memory by default. A run removes it at
    its end."""
    return Path(json.loads((run_dir / "config.json").read_text())["weight_update"]["weight_dir"])


def make_world(device: str = "cpu", arch: str | None = None, dtype: str | None = None) -> Iterator[World]:
    """Yields a world in a folder with a short path (Unix socket paths have a limit), and removes it (for a module's
    fixture)."""
    root = Path(tempfile.mkdtemp(prefix="vime-e2e-"))
    try:
        yield World(root, device, arch, dtype)
    finally:
        shutil.rmtree(root, ignore_errors=True)
