"""Compares our rollout with plain vLLM clients on the same live engine: both speeds in tokens/s, and their ratio.

    python benchmarks/rollout_speed.py --model Qwen3-4B --out rollout_speed.json
    python benchmarks/rollout_speed.py --model tiny/base --requests 16 --response-tokens 24 --rounds 2   (CPU)
    python benchmarks/rollout_speed.py --model tiny/base --instant     the time of our side, without an engine

Any other flag goes to the run's configuration (--vllm-gpu-memory-utilization 0.85). Every contender sends the same
prompts and requests the same number of tokens, all requests at once. The end token does not end a response:

    ours                one rollout of the rollout manager: prompts, router, rewards, groups, train data, packing
    raw                 a plain HTTP client at the engine, which requests only text
    raw, log-probs      the same client, which also requests the sampled token ids and log-probs, as any trainer does
    our client alone    one request per group, without samples, rewards and hooks

The contenders take turns, in an order that changes. Before each turn, the engine's prompt cache is emptied. The first
round is a warm-up. The main figure is ours / raw; the other ratios show the sources of the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import torch
from operator_bench.machine import describe

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.data.tokenizer import load_tokenizer
from slime.data.transport import pack_columns
from slime.rollout.generate import generate
from slime.rollout.manager import RolloutManager
from slime.types import Sample
from vime.backends import parse_config
from vime.pool.control import SERVED_MODEL_NAME
from vime.pool.engine_flags import engine_dtype
from vime.pool.process import sigterm_interrupts
from vime.pool.router import RouterSpec
from vime.vllm import versions as vllm_versions
from vime.vllm.client import VllmEngineClient
from vime.vllm.control import VllmControl
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmSpec
from vime.vllm.server_flags import engine_settings

OURS, RAW = "ours", "raw"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
LOG_PROBS, CLIENT = "raw, log-probs", "our client alone"
TARGET = 0.9
PATIENCE_S = 1800.0
"""Longest wait for the file of --after, in seconds."""


async def generate_whole(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The rollout's generate function, with responses of full length."""
    return await generate(args, sample, {**sampling_params, "ignore_eos": True})


@dataclass(frozen=True)
class Engine:
    """The contenders' engine. `url` is the engine's address; `forget` empties its prompt cache."""

    client: VllmEngineClient
    url: str
    key: str
    forget: Callable[[], None]
    facts: dict[str, Any]


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the script's options, and the remaining flags for `vime train`."""
    parser = argparse.ArgumentParser(
        description="Tokens/s of our rollout and of raw vLLM.", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory; random weights will do")
    parser.add_argument("--requests", type=int, default=256, help="at the same time (default 256)")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt (default 8)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="that are counted (default 5)")
    parser.add_argument("--instant", action="store_true", help="an engine that answers at once (CPU seconds)")
    parser.add_argument("--after", type=Path, metavar="FILE", help="start, and measure when FILE is there")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--commit", help="for a machine that holds the files without their git history")
    args, flags = parser.parse_known_args(argv)
    if args.requests % args.group:
        parser.error(f"--requests must be a multiple of --group {args.group}, got {args.requests}")
    if args.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {args.rounds}")
    return args, flags


def write_prompts(path: Path, args: argparse.Namespace) -> None:
    """Writes prompts of --prompt-tokens random digits for all rounds. A digit is one token in Qwen's tokenizers and
    ours."""
    digits, tokenizer = random.Random(0), load_tokenizer(args.model)
    texts = [
        "".join(digits.choices("0123456789", k=args.prompt_tokens))
        for _ in range(args.requests // args.group * (args.rounds + 1))
    ]
    length = len(tokenizer.encode(texts[0], add_special_tokens=False))
    if length != args.prompt_tokens:
        raise ValueError(f"--model must have a tokenizer with a token a digit, got {length} for {texts[0]}")
    path.write_text(
        "".join(json.dumps({"prompt": text, "label": "0"}) + "\n" for text in texts), encoding="utf-8"
    )


def configure(args: argparse.Namespace, flags: list[str], folder: Path) -> Config:
    """Returns the configuration of a run with rollouts only, and the cheapest reward."""
    write_prompts(folder / "prompts.jsonl", args)
    return parse_config(
        [
            *("--hf-checkpoint", args.model, "--prompt-data", str(folder / "prompts.jsonl")),
            *("--input-key", "prompt", "--label-key", "label", "--rm-type", "random"),
            *("--rollout-batch-size", str(args.requests // args.group)),
            *("--n-samples-per-prompt", str(args.group), "--global-batch-size", str(args.requests)),
            *("--num-rollout", str(args.rounds + 1), "--debug-rollout-only", "--rollout-num-gpus", "1"),
            *("--rollout-max-response-len", str(args.response_tokens)),
            *("--custom-generate-function-path", "rollout_speed.generate_whole"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "16384", "--balance-data"),
            *("--run-dir", str(folder), "--weight-dir", str(folder / "weights"), *flags),
        ]
    )


@contextmanager
def vllm_engine(config: Config, folder: Path) -> Iterator[Engine]:
    """Starts one engine behind the router, as `vime train` does, without Ray."""
    key = secrets.token_hex(32)
    spec = VllmSpec(**engine_settings(config), run_key=key, log_path=str(folder / "engine.log"))
    router = RouterSpec(
        run_key=key, log_path=str(folder / "router.log"), argv=tuple(config.engine.router_argv)
    )
    pool = VllmEnginePool([spec], router)
    try:
        pool.start()
        url, address = pool.engine_urls[0], urlsplit(pool.router_url)
        facts = {
            "vllm_router_ip": address.hostname,
            "vllm_router_port": address.port,
            "vllm_router_headers": {"Authorization": f"Bearer {key}"},
            "rollout_engine_dtype": engine_dtype(config),
        }
        yield Engine(pool.client(), url, key, VllmControl(url, key).reset_prefix_cache, facts)
    finally:
        pool.stop()


@contextmanager
def instant_engine() -> Iterator[Engine]:
    command = [sys.executable, str(Path(__file__).with_name("instant_engine.py"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        yield Engine(VllmEngineClient(url, "none"), url, "none", lambda: None, {})
    finally:
        process.terminate()
        process.wait()


class Contest:
    """The contenders. Each is a method that takes a round's number and returns (tokens, seconds)."""

    def __init__(self, args: argparse.Namespace, config: Config, engine: Engine) -> None:
        self.args, self.engine = args, engine
        # Ray pickles the data of the trainers in the same way.
        self.manager = RolloutManager(
            config, engine.client, 1, engine.facts, lambda data: pickle.dumps(pack_columns(data))
        )
        self.manager.load(0)
        tokenizer = load_tokenizer(args.model)
        with open(config.data.prompt_data, encoding="utf-8") as lines:
            texts = [json.loads(line)["prompt"] for line in lines]
        self.prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self.contenders: dict[str, Callable[[int], tuple[int, float]]] = {
            OURS: self.ours,
            RAW: lambda turn: self.raw(turn, {}),
            LOG_PROBS: lambda turn: self.raw(turn, {"logprobs": 0, "return_token_ids": True}),
            CLIENT: self.client_alone,
        }

    def ours(self, turn: int) -> tuple[int, float]:
        began = time.perf_counter()
        batch = self.manager.generate(turn)
        seconds = time.perf_counter() - began
        data = pickle.loads(batch.rank_data[0])  # ok: this process has just made these bytes
        responses = data["response_lengths"]
        assert len(responses) == self.args.requests, f"{len(responses)} samples of {self.args.requests}"
        return sum(responses), seconds

    def wanted(self, turn: int) -> list[list[int]]:
        """Returns one prompt per request."""
        prompts = self.args.requests // self.args.group
        first = turn * prompts
        return [ids for ids in self.prompts[first : first + prompts] for _ in range(self.args.group)]

    def client_alone(self, turn: int) -> tuple[int, float]:
        """Sends the requests of our rollout, without samples, rewards and hooks."""
        params = {**SAMPLING, "max_new_tokens": self.args.response_tokens}

        async def ask() -> tuple[int, float]:
            client = VllmEngineClient(self.engine.url, self.engine.key)
            began = time.perf_counter()
            wanted = enumerate(self.wanted(turn))
            asked = (client.generate(ids, params, seed=seed, deadline_s=600) for seed, ids in wanted)
            tokens = sum(len(result.token_ids) for result in await asyncio.gather(*asked))
            seconds = time.perf_counter() - began
            await client.close()
            return tokens, seconds

        return asyncio.run(ask())

    def raw(self, turn: int, extra: dict[str, Any]) -> tuple[int, float]:
        """Sends requests to vLLM's /v1/completions. `extra` has fields in addition to the prompt and its sampling."""
        same = {"model": SERVED_MODEL_NAME, "max_tokens": self.args.response_tokens, **SAMPLING, **extra}
        return asyncio.run(self._ask([{**same, "prompt": ids} for ids in self.wanted(turn)]))

    async def _ask(self, bodies: list[dict[str, Any]]) -> tuple[int, float]:
        headers, connections = {"Authorization": f"Bearer {self.engine.key}"}, aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, connector=connections, timeout=timeout) as session:

            async def one(body: dict[str, Any]) -> int:
                async with session.post(f"{self.engine.url}/v1/completions", json=body) as response:
                    response.raise_for_status()
                    return msgspec.json.decode(await response.read())["usage"]["completion_tokens"]

            began = time.perf_counter()
            tokens = sum(await asyncio.gather(*map(one, bodies)))
            return tokens, time.perf_counter() - began

    def run(self) -> dict[str, list[dict[str, float]]]:
        """Runs every turn of every contender. The result leaves out the warm-up round."""
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in self.contenders}
        expected = self.args.requests * self.args.response_tokens
        for turn in range(self.args.rounds + 1):
            order = list(self.contenders)
            order = order[turn % len(order) :] + order[: turn % len(order)]
            for name in order:
                self.engine.forget()
                cpu = time.process_time()
                tokens, seconds = self.contenders[name](turn)
                cpu = time.process_time() - cpu
                assert tokens == expected, f"{name} made {tokens} tokens, {expected} were asked for"
                if turn:
                    turns[name].append({"tokens_per_s": tokens / seconds, "seconds": seconds, "cpu_s": cpu})
        return turns


def summary(args: argparse.Namespace, turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Returns medians over the rounds: tokens/s, ours / each raw client, and requests per core of our side."""
    speed = {name: statistics.median(t["tokens_per_s"] for t in each) for name, each in turns.items()}
    cpu_s = statistics.median(t["cpu_s"] for t in turns[OURS])
    return {
        "requests": args.requests,
        "prompt_tokens": args.prompt_tokens,
        "response_tokens": args.response_tokens,
        "engine": "instant" if args.instant else "vllm",
        "tokens_per_s": speed,
        "ours_to": {name: speed[OURS] / speed[name] for name in speed if name != OURS},
        "ours_requests_per_cpu_s": args.requests / cpu_s,
        "target": TARGET,
    }


def table(found: dict[str, Any]) -> str:
    shape = "{requests} requests at a time, {prompt_tokens} + {response_tokens} tokens each".format(**found)
    lines = [f"{shape}, engine: {found['engine']}", f"{'':<20}{'tokens/s':>12}{'ours / it':>12}"]
    for name, speed in found["tokens_per_s"].items():
        ratio = found["ours_to"].get(name)
        lines.append(f"{name:<20}{speed:>12,.0f}{'' if ratio is None else f'{ratio:.3f}':>12}")
    lines.append(f"our side alone: {found['ours_requests_per_cpu_s']:,.0f} requests a CPU second")
    return "\n".join(lines)


def wait_for(file: Path | None) -> None:
    """Waits until the file exists. TimeoutError after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while file is not None and not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"--after must be there within {PATIENCE_S:g} s, got no {file}")
        time.sleep(0.1)


def main(argv: Sequence[str] | None = None) -> int:
    args, flags = parse(argv)
    try:
        with sigterm_interrupts():
            report(args, flags, argv)
    except ValueError as error:
        print(f"rollout_speed: {error}", file=sys.stderr)
        return 2
    return 0


def report(args: argparse.Namespace, flags: list[str], argv: Sequence[str] | None) -> None:
    """Measures, prints the results, and writes --out."""
    read_hf_config(args.model)  # A missing folder is an error; it is not searched on the hub.
    if args.out is not None and not args.out.parent.is_dir():
        raise ValueError(f"--out must name a file in a folder that exists, got {args.out}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vime-bench-")))
        config = configure(args, flags, folder)
        engine = stack.enter_context(instant_engine() if args.instant else vllm_engine(config, folder))
        contest = Contest(args, config, engine)
        stack.callback(contest.manager.close)
        wait_for(args.after)
        turns = contest.run()
    command = ["benchmarks/rollout_speed.py", *(sys.argv[1:] if argv is None else argv)]
    machine = describe(torch.device(config.cluster.device), command, args.commit)
    found = {
        "machine": {**machine, "vllm": vllm_versions.installed()},
        **summary(args, turns),
        "turns": turns,
    }
    print(table(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
