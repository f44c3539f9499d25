"""Measures the time of a step of vLLM's engine, by default and with the operators of --rlk-bitwise.

    python benchmarks/engine_steps.py OUT.json --model runs/smollm2/sft
    python benchmarks/engine_steps.py OUT.json --model MODEL --sides bitwise --requests 64 --no-profile

Each side has an engine in a separate process, with random prompts and no weights from a trainer. Sides: default,
default-1 (the older of vLLM's two model runners), bitwise and bitwise-1. On a GPU, all sides have the CUDA graphs of
our servers. Measured:

    decode N      milliseconds per token with N concurrent requests
    prompts N     milliseconds of a call with N prompts of 100 tokens and one token each
    load          seconds and steps of --requests groups of 16 requests with one prompt and answers of 4 to 128 tokens,
                  of which --running run at a time, as in a rollout; again under torch's profiler: the device's time,
                  by kernel

Each kind's first call is a warm-up. A time of decoding is the mean of two calls with 33 tokens minus the mean of
two calls with one token. A time of prompts is the median of three calls. The load is the faster of two calls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slime.config.sections.kernels import BITWISE_OPERATORS
from vime.vllm.server import GRAPH_TOKENS, WORKERS
from vime.vllm.worker import bitwise
from vime.vllm.worker.settings import EngineSettings

_OLDER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
_OURS = bitwise.ENVIRONMENT
SIDES = {"default": {}, "default-1": _OLDER, "bitwise": _OURS, "bitwise-1": {**_OURS, **_OLDER}}
"""Side -> environment variables of its process. The bitwise sides have the variables of engines with --rlk-bitwise."""
PROMPT, GROUP, LONGEST = 100, 16, 128
KERNELS = 14
"""Number of kernels in a record: the kernels with the longest times."""


class Engine:
    """vLLM in this process."""

    def __init__(self, asked: argparse.Namespace) -> None:
        from vllm import LLM

        more: dict[str, Any] = {}
        if asked.device == "cuda":
            more["gpu_memory_utilization"] = 0.3
            more["compilation_config"] = {"cudagraph_capture_sizes": [*GRAPH_TOKENS]}
        if bitwise.ENVIRONMENT.items() <= os.environ.items():
            more["additional_config"] = json.loads(EngineSettings(bitwise=BITWISE_OPERATORS).flags()[1])
            if asked.device == "cuda":
                more["compilation_config"] |= json.loads(bitwise.compilation())
        self.llm = LLM(
            str(asked.model),
            dtype="bfloat16" if asked.device == "cuda" else "float32",
            max_model_len=512,
            max_num_seqs=asked.running,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            worker_cls=WORKERS[asked.device],
            **more,
        )
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.random = random.Random(0)

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(10, self.vocabulary - 10) for _ in range(tokens)]

    def run(self, prompts: list[list[int]], lengths: list[int]) -> tuple[float, int]:
        """Returns seconds and steps until each prompt has an answer of its length. All requests start together."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        engine.reset_prefix_cache()
        for at, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(
                temperature=1.0,
                max_tokens=length,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"{at}", {"prompt_token_ids": tokens}, params)
        start, steps = time.perf_counter(), 0
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
        return time.perf_counter() - start, steps

    def decode(self, requests: int) -> float:
        long = [
            self.run([self.prompt(PROMPT) for _ in range(requests)], [33] * requests)[0] for _ in range(3)
        ]
        short = [
            self.run([self.prompt(PROMPT) for _ in range(requests)], [1] * requests)[0] for _ in range(3)
        ]
        return (statistics.median(long[1:]) - statistics.median(short[1:])) / 32 * 1e3

    def prompts(self, requests: int) -> float:
        times = [
            self.run([self.prompt(PROMPT) for _ in range(requests)], [1] * requests)[0] for _ in range(4)
        ]
        return statistics.median(times[1:]) * 1e3

    def load(self, groups: int) -> tuple[list[list[int]], list[int]]:
        self.random.seed(1)
        prompts = [self.prompt(self.random.randrange(60, 180)) for _ in range(groups)]
        each = [prompt for prompt in prompts for _ in range(GROUP)]
        return each, [min(LONGEST, 4 + int(self.random.expovariate(1 / 40))) for _ in each]


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    engine = Engine(asked)
    found: dict[str, Any] = {"start_s": time.perf_counter() - start}
    for requests in asked.decode:
        found[f"decode {requests}, ms"] = engine.decode(requests)
        tell(found)
    for requests in asked.prompts:
        found[f"prompts {requests}, ms"] = engine.prompts(requests)
        tell(found)
    prompts, lengths = engine.load(asked.requests)
    times = [engine.run(prompts, lengths) for _ in range(3)]
    seconds, found["load, steps"] = sorted(times[1:])[0]
    found["load, s"], found["load, tokens/s"] = seconds, sum(lengths) / seconds
    tell(found)
    if asked.profile:
        found["load, kernels"] = profiled(engine, prompts, lengths, asked.device)
    return found


def profiled(engine: Engine, prompts: list[list[int]], lengths: list[int], device: str) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        engine.run(prompts, lengths)
    time_of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = sorted(seen.key_averages(), key=lambda row: -getattr(row, time_of))
    return {
        "all, ms": sum(getattr(row, time_of) for row in rows) / 1e3,
        **{row.key: [getattr(row, time_of) / 1e3, row.count] for row in rows[:KERNELS]},
    }


def tell(found: dict[str, Any]) -> None:
    name, value = list(found.items())[-1]
    print(f"  {name}: {value:.3f}" if isinstance(value, float) else f"  {name}: {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure steps of vLLM's engine.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sides", default=",".join(SIDES), help="separated by commas")
    parser.add_argument("--requests", type=int, default=80, help=f"groups of {GROUP} of the load")
    parser.add_argument("--running", type=int, default=512, help="requests that run at a time")
    parser.add_argument("--decode", type=int, nargs="*", default=[8, 64, 256, 512])
    parser.add_argument("--prompts", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        asked.out.write_text(json.dumps(measure(asked)), encoding="utf-8")
        return
    sides = asked.sides.split(",")
    if unknown := [side for side in sides if side not in SIDES]:
        parser.error(f"--sides must be of {', '.join(SIDES)}, got {unknown[0]}")
    record: dict[str, Any] = {}
    for side in sides:
        print(side, flush=True)
        part = asked.out.with_suffix(f".{side}.json")
        env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        argv = [sys.argv[0], str(part), *sys.argv[2:], "--here"]
        code = subprocess.run([sys.executable, *argv], env=env | SIDES[side]).returncode
        record[side] = json.loads(part.read_text(encoding="utf-8")) if code == 0 else f"exit code {code}"
        asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
