"""`python scripts/docs_long.py`: the table of docs/long-sequences.md, where samples of 32k to 1M tokens fit.

The numbers are those of `vime plan`. A house test compares the page with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from architectures import ARCHITECTURES

from slime.config import Config
from slime.hardware import HARDWARE
from slime.plan.fit import Fit, MachineSizes, fit
from slime.plan.units import GIB
from slime.rules.resolve import resolve

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/long-sequences.md")
COMMAND = "python scripts/docs_long.py"
BEGIN, END = "<!-- planned by scripts/docs_long.py -->\n", "<!-- end of the plan -->\n"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WAYS: dict[str, dict[str, object]] = {
    "no other flag": {},
    "inputs of layers on the host": {"cpu_offloading": True},
    "Adam on the host": {"optimizer_cpu_offload": True},
    "both on the host": {"cpu_offloading": True, "optimizer_cpu_offload": True},
}
"""Flags in addition to context parallelism and full recomputation, in the order in which they are tried."""
ROWS = [
    ("qwen3-4b", 2**15, (1, 2)),
    ("qwen3-4b", 2**17, (1, 2, 4)),
    ("qwen3-4b", 2**18, (2, 4, 8)),
    ("qwen3-4b", 2**20, (8, 16, 32)),
    ("qwen3-30b-a3b", 2**17, (8, 16)),
    ("qwen3-30b-a3b", 2**20, (16, 32)),
]
"""Model, tokens of a sample, numbers of GPUs."""
HOST_GIB = 2048.0
PER_HOST = 8


def shape(arch: str) -> dict[str, object]:
    """Returns config.json of a model."""
    row = ARCHITECTURES[arch]
    return {"model_type": row.family, "hidden_act": "silu", **row.config_fields()}


def planned(arch: str, tokens: int, gpus: int, flags: dict[str, object]) -> Config:
    """Returns a run that only trains. Each sequence is shared by all GPUs, and the experts too."""
    experts = {"expert_model_parallel_size": min(gpus, 8)} if "num_experts" in shape(arch) else {}
    nodes = -(-gpus // PER_HOST)
    values = {
        "device": "cuda",
        "params_dtype": "bfloat16",
        "debug_train_only": True,
        "rollout_num_gpus": 0,
        "actor_num_nodes": nodes,
        "actor_num_gpus_per_node": gpus // nodes,
        "context_parallel_size": gpus,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": tokens // gpus,
        "rollout_max_context_len": tokens,
        "overrides": FULL,
        **experts,
        **flags,
    }
    return resolve(values)


def cell(arch: str, hf: dict[str, object], tokens: int, gpus: int, gpu: str) -> str:
    """Returns the first flags with which the run fits, and the GiB of a GPU while it trains."""
    machine = MachineSizes(HARDWARE[gpu].memory_gib * GIB, HOST_GIB * GIB)
    for name, flags in WAYS.items():
        found = fit(planned(arch, tokens, gpus, flags), hf, machine)
        if found.over <= 0:
            return f"{_training(found):.0f} GiB, {name}"
    return f"no: {_training(found):.0f} GiB"


def _training(found: Fit) -> float:
    return max(need.bytes for need in found.needs if need.of == "a GPU") / GIB


def table() -> Iterator[str]:
    gpus = ("h100", "h200")
    yield (
        "| Model | tokens of a sample | GPUs | "
        + " | ".join(f"{name.upper()}, {HARDWARE[name].memory_gib:.0f} GiB" for name in gpus)
        + " |"
    )
    yield "| --- | --- | --- |" + " --- |" * len(gpus)
    for arch, tokens, counts in ROWS:
        hf = shape(arch)
        for count in counts:
            cells = (cell(arch, hf, tokens, count, gpu) for gpu in gpus)
            yield f"| {arch} | {tokens:,} | {count} | {' | '.join(cells)} |"


def page() -> str:
    """Returns the page with the table between its marks."""
    before, rest = (ROOT / PAGE).read_text(encoding="utf-8").split(BEGIN)
    return "\n".join([f"{before}{BEGIN}", *table(), "", END]) + rest.split(END)[1]


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    print(PAGE)
