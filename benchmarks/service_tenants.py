"""Measures how many tokens per second the tenants of `vime service` get in sum: one tenant, and several.

    python benchmarks/service_tenants.py OUT.json --model MODEL --device cpu --rank 8
    python benchmarks/service_tenants.py OUT.json --model MODEL --device cuda --rank 32 --memory 0.4

The script has the parts of the service, without its HTTP front: one trainer with all adapters in a thread, and one vLLM
engine in another process. On GPUs, both share one card. It measures:

    train    passes with gradients, each followed by a step of Adam. One tenant runs all, or the tenants take turns.
    sample   --requests requests at a time: all for one adapter, or for the adapters in turn
    both     rounds of a tenant: it samples, trains on the samples, exports its adapter and loads it into the engine.
             All tenants run their rounds at the same time.

Each tenant has the same load in `both`. `train` and `sample` have the same load in sum for any number of tenants, so
that their ratio shows the cost of turns. Measurements of one tenant and of several alternate over --repeats, after one
repeat as warm-up. A speed is the median, and `ratio` is the speed of several tenants divided by the speed of one. The
switch is the time until the model computes with another tenant's adapter.

Each phase prints a line with the seconds since the start. The script writes OUT.json after
each measurement. A run that is cut off leaves its finished measurements, with `complete` false. `seconds` has the
times of the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from operator_bench.machine import describe

from slime.checkpoints.hf_config import read_hf_config
from slime.megatron_backend.tenants import build_trainer
from slime.megatron_backend.tenants.trainer import Trainer
from slime.protocols.tenants import AdamParams, LossSpec, TenantDatum, TenantSampling, TenantSpec
from vime.service.engine import TenantEngine

GOAL = 0.8
"""Least ratio that the project aims for."""
SIZES = {
    "cpu": {"sequences": 8, "prompt": 32, "response": 32, "requests": 32, "micro_batch": 512},
    "cuda": {"sequences": 16, "prompt": 256, "response": 768, "requests": 64, "micro_batch": 4096},
}
"""Device -> default sizes."""
STEP, LOSS = AdamParams(learning_rate=1e-5), LossSpec("importance_sampling")
SWITCHES = 1000
WAIT_S = 15.0


class Progress:
    """Prints each phase with the seconds since the start, and writes the record of the finished measurements."""

    def __init__(self, out: Path, record: dict[str, Any]) -> None:
        self._out, self._record, self._start = out, record, time.perf_counter()
        self.measured: dict[str, Any] = {"seconds": {}}

    def print(self, text: str) -> None:
        print(f"{time.perf_counter() - self._start:6.1f} s  {text}", flush=True)

    def save(self, *, complete: bool = False) -> None:
        """Replaces the file in one step: a run that ends here leaves the old file or the new one."""
        text = json.dumps({**self._record, "complete": complete, "measured": self.measured}, indent=1)
        new = self._out.with_name(f"{self._out.name}.new")
        new.write_text(f"{text}\n", encoding="utf-8")
        new.replace(self._out)

    async def run(self, phase: str, work: Awaitable[Any], log: Path | None = None) -> Any:
        """Waits for a phase of the start. Meanwhile, prints the last line of `log` every WAIT_S seconds."""
        start, task = time.perf_counter(), asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=WAIT_S))[0]:
            lines = (
                log.read_text(encoding="utf-8", errors="replace").split("\n")[-2:]
                if log and log.exists()
                else []
            )
            self.print(f"{phase}: not ready yet. {''.join(lines)[-120:]}")
        found = await task
        self.measured["seconds"][phase] = round(time.perf_counter() - start, 1)
        self.print(f"{phase}: ready")
        self.save()
        return found


@dataclass
class Service:
    """The trainer in its thread, and the engine. `serving` are the names under which the engine has adapters."""

    trainer: Trainer
    engine: TenantEngine
    thread: ThreadPoolExecutor
    sizes: argparse.Namespace
    vocabulary: int
    folder: Path
    serving: dict[str, str] = field(default_factory=dict)
    exports: int = 0

    async def on_trainer(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, call)

    def make_tokens(self, seed: str, count: int) -> list[int]:
        rng = random.Random(seed)
        return rng.choices(range(10, self.vocabulary - 10), k=count)

    def make_datum(self, prompt: list[int], response: list[int], log_probs: list[float]) -> TenantDatum:
        """Returns a datum whose loss covers the response."""
        tokens, skipped = prompt + response, len(prompt) - 1
        advantages = [0.0] * skipped + [1.0 if len(tokens) % 2 else -1.0] * len(response)
        inputs: dict[str, Sequence[float]] = {
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * skipped + log_probs,
            "advantages": advantages,
        }
        return TenantDatum(tokens[:-1], inputs)

    def make_data(self, tenant: str) -> list[TenantDatum]:
        found = []
        for number in range(self.sizes.sequences):
            tokens = self.make_tokens(f"{tenant} {number}", self.sizes.prompt + self.sizes.response)
            prompt, response = tokens[: self.sizes.prompt], tokens[self.sizes.prompt :]
            found.append(self.make_datum(prompt, response, [-math.log(self.vocabulary)] * len(response)))
        return found

    def train_step(self, tenant: str, data: list[TenantDatum]) -> int:
        """Returns the number of trained tokens. Runs in the trainer's thread."""
        self.trainer.forward_backward(tenant, data, LOSS)
        self.trainer.optim_step(tenant, STEP)
        return sum(len(datum.tokens) for datum in data)

    async def publish(self, tenant: str) -> None:
        """Exports the tenant's adapter, and loads it into the engine under a new name, as a saved sampler of the
        service."""
        self.exports += 1
        name, before = f"{tenant}-{self.exports}", self.serving.get(tenant)
        await self.on_trainer(partial(self.trainer.export_peft, tenant, self.folder / name))
        await self.engine.load(name, self.folder / name)
        self.serving[tenant] = name
        if before is not None:
            await self.engine.unload(before)

    async def sample(self, tenant: str, prompt: list[int]) -> tuple[list[int], list[float]]:
        params = TenantSampling(max_tokens=self.sizes.response, ignore_end=True)
        (sampled,) = (await self.engine.sample(self.serving[tenant], prompt, params)).sequences
        return sampled.tokens, sampled.logprobs

    async def train(self, tenants: Sequence[str]) -> int:
        """Runs --passes passes in sum, in turns of the tenants. Returns the number of trained tokens."""
        data = {tenant: self.make_data(tenant) for tenant in tenants}
        turns = [tenants[number % len(tenants)] for number in range(self.sizes.passes)]
        return sum(
            [await self.on_trainer(partial(self.train_step, tenant, data[tenant])) for tenant in turns]
        )

    async def sample_all(self, tenants: Sequence[str]) -> int:
        """Returns the number of sampled tokens."""
        of = [tenants[number % len(tenants)] for number in range(self.sizes.requests)]
        prompts = [self.make_tokens(f"{time.time_ns()} {n}", self.sizes.prompt) for n in range(len(of))]
        found = await asyncio.gather(*map(self.sample, of, prompts))
        return sum(len(tokens) for tokens, _ in found)

    async def run_rounds(self, tenants: Sequence[str]) -> int:
        """Returns the number of sampled and trained tokens of all rounds."""
        return sum(await asyncio.gather(*(self._run_tenant(tenant) for tenant in tenants)))

    async def _run_tenant(self, tenant: str) -> int:
        total = 0
        for _ in range(self.sizes.rounds):
            prompts = [
                self.make_tokens(f"{tenant} {time.time_ns()} {n}", self.sizes.prompt)
                for n in range(self.sizes.sequences)
            ]
            found = await asyncio.gather(*(self.sample(tenant, prompt) for prompt in prompts))
            data = [
                self.make_datum(prompt, tokens, log_probs)
                for prompt, (tokens, log_probs) in zip(prompts, found, strict=True)
            ]
            total += sum(len(tokens) for tokens, _ in found)
            total += await self.on_trainer(partial(self.train_step, tenant, data))
            await self.publish(tenant)
        return total

    def time_switch(self, tenants: Sequence[str]) -> float:
        """Returns the microseconds of a switch between tenants. Runs in the trainer's thread."""
        found = [self.trainer.tenants[tenant] for tenant in tenants]
        start = time.perf_counter()
        for number in range(SWITCHES):
            self.trainer.activate(found[number % len(found)])
        return (time.perf_counter() - start) / SWITCHES * 1e6


async def create(service: Service, tenants: Sequence[str]) -> None:
    """Makes an adapter per tenant, and loads it into the engine."""
    for tenant in tenants:
        spec = TenantSpec(service.sizes.rank)
        await service.on_trainer(partial(service.trainer.add, tenant, spec))
        await service.publish(tenant)


async def measure(service: Service, tenants: Sequence[str], repeats: int, progress: Progress) -> None:
    """Measures the speeds of all kinds, in tokens per second."""
    kinds: dict[str, Callable[[Sequence[str]], Awaitable[int]]] = {
        "train": service.train,
        "sample": service.sample_all,
        "both": service.run_rounds,
    }
    record = progress.measured
    record["bytes_per_tenant"] = service.trainer.tenants[tenants[0]].count_bytes()
    record["switch_us"] = await service.on_trainer(partial(service.time_switch, tenants))
    for kind, run in kinds.items():
        speeds: dict[int, list[float]] = {1: [], len(tenants): []}
        for repeat in range(repeats + 1):
            for count in speeds:
                start = time.perf_counter()
                speed = await run(tenants[:count]) / (time.perf_counter() - start)
                if repeat:  # the first is the warm-up
                    speeds[count].append(speed)
                turn = f"repeat {repeat} of {repeats}" if repeat else "warm-up"
                progress.print(f"{kind}, {turn}, tenants {count}: {speed:.0f} tokens/s")
            if repeat:
                one, several = (statistics.median(speeds[count]) for count in speeds)
                record[kind] = {"one": one, "several": several, "ratio": several / one, "repeats": speeds}
                if service.sizes.device == "cuda":
                    record["trainer_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                progress.save()
        progress.print(f"{kind}: {one:.0f} and {several:.0f} tokens/s, ratio {several / one:.2f}")


async def run(sizes: argparse.Namespace, folder: Path, progress: Progress) -> None:
    context, tenants = sizes.prompt + sizes.response, [f"t{number}" for number in range(sizes.tenants)]
    # while a tenant exports, the engine has its last adapter and its next one
    engine = TenantEngine(
        sizes.model,
        2 * sizes.tenants,
        sizes.rank,
        context,
        folder / "engine",
        device=sizes.device,
        memory=sizes.memory,
        eager=sizes.eager,
    )
    thread = ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()
    build = partial(build_trainer, sizes.model, sizes.rank, context)
    build = partial(build, device=sizes.device, micro_batch=sizes.micro_batch)
    # the trainer is first: the engine then measures the free memory
    trainer = await progress.run("trainer", loop.run_in_executor(thread, build))
    try:
        await progress.run("engine", engine.start(), folder / "engine" / "engine.log")
        vocabulary = read_hf_config(str(sizes.model))["vocab_size"]
        service = Service(trainer, engine, thread, sizes, vocabulary, folder)
        await progress.run(f"adapters of {len(tenants)} tenants", create(service, tenants))
        await measure(service, tenants, sizes.repeats, progress)
    finally:
        await engine.stop()
        await loop.run_in_executor(thread, trainer.close)
        thread.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure tokens per second of one tenant and of several.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--memory", type=float, default=0.4, help="share of the card for the engine")
    parser.add_argument("--sequences", type=int, help="sequences of a pass, and of a round's samples")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument("--response", type=int, help="tokens of a response")
    parser.add_argument("--requests", type=int, help="requests at a time")
    parser.add_argument("--micro-batch", type=int, help="most tokens of a micro-batch")
    parser.add_argument("--passes", type=int, default=16, help="passes of `train`")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a tenant")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--eager", action="store_true", help="start the engine faster: no compilation, no CUDA graphs"
    )
    parser.add_argument("--note", default="", help="other load on the machine")
    parser.add_argument("--commit", help="for a machine that has the files without their git history")
    sizes = parser.parse_args(argv)
    for name, value in SIZES[sizes.device].items():
        if getattr(sizes, name) is None:
            setattr(sizes, name, value)
    if sizes.tenants < 2:
        parser.error(f"--tenants must be at least 2, got {sizes.tenants}; one tenant is always measured")
    command = ["benchmarks/service_tenants.py", *(sys.argv[1:] if argv is None else argv)]
    flags = {name: value for name, value in vars(sizes).items() if isinstance(value, int | float)}
    machine = describe(torch.device(sizes.device), command, sizes.commit)
    progress = Progress(sizes.out, {"machine": machine, "note": sizes.note, "goal": GOAL, **flags})
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(sizes, Path(folder), progress))
    progress.save(complete=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
