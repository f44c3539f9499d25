"""Plan every configuration of examples/ without weights, and write the table of their memory into examples/README.md.

python scripts/plan_examples.py            print the table
python scripts/plan_examples.py --write    print it and write it into examples/README.md
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from make_model import ARCHITECTURES, build_config

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.hardware import HARDWARE
from slime.plan.memory_decision import (
    BESIDES_GENERATING,
    TOO_SMALL,
    beside_engine,
    decide_residence,
    training,
)
from slime.plan.memory_estimate import estimate
from slime.plan.model_shape import Shape
from slime.plan.units import GIB
from vime.backends import parse_config
from vime.vllm.memory import engine_memory, engine_verdict

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BEGIN, END = "<!-- planned: begin -->", "<!-- planned: end -->"


@dataclass(frozen=True)
class Planned:
    """One configuration on its GPUs. `verdicts` are those of `vime plan`. Sizes are per GPU."""

    file: Path
    config: Config
    gpus: int
    training_gib: float
    generating_gib: float
    verdicts: tuple[str, ...]

    @property
    def memory_gib(self) -> float:
        return HARDWARE[self.config.cluster.gpu].memory_gib

    @property
    def peak_share(self) -> float:
        """Share of the GPU's memory that is in use at the peak."""
        return max(self.training_gib, self.generating_gib) / self.memory_gib

    @property
    def fits(self) -> bool:
        return not any(verdict.startswith(TOO_SMALL) for verdict in self.verdicts)


def files() -> list[Path]:
    """Every layout, sorted by model."""
    return sorted(path for path in EXAMPLES.glob("*/*.yaml") if path.parent.name in ARCHITECTURES)


def flags(file: Path, model: Path) -> list[str]:
    """The command line of an example, with the model and prompts in `model`."""
    configs = ("--config", str(EXAMPLES / "grpo.yaml"), str(file))
    rewards = ("--input-key", "prompt", "--label-key", "label", "--rm-type", "deepscaler")
    return [*configs, "--hf-checkpoint", str(model), "--prompt-data", str(model / "prompts.jsonl"), *rewards]


def write_model(arch: str, folder: Path) -> Path:
    """Write config.json and one prompt, the files that a plan reads."""
    model = folder / arch
    if not model.is_dir():
        model.mkdir()
        (model / "config.json").write_text(
            build_config(arch).to_json_string(use_diff=False), encoding="utf-8"
        )
        (model / "prompts.jsonl").write_text(
            json.dumps({"prompt": "1+1=", "label": "2"}) + "\n", encoding="utf-8"
        )
    return model


def plan(file: Path, folder: Path) -> Planned:
    """The estimates of one configuration. `vime plan` and a run decide from the same estimates."""
    model = write_model(file.parent.name, folder)
    c = parse_config(flags(file, model))
    hf, size = read_hf_config(str(model)), HARDWARE[c.cluster.gpu].memory_gib * GIB
    e, decision = estimate(c, hf), None
    decision = decide_residence(c, e, size)
    if c.cluster.colocate:
        generating = max(moment.bytes for moment in beside_engine(c, e, decision.leaving, size))
    else:
        weights, _token, *cache = engine_memory(c, Shape.of(hf))
        share = c.engine.backend_args["gpu_memory_utilization"] * size
        generating = min(share, weights.bytes + sum(item.bytes for item in cache) + BESIDES_GENERATING)
    gpus = c.world_size + (0 if c.cluster.colocate else c.cluster.rollout_num_gpus)
    verdicts = (*(line for line in decision.lines if "fit" in line), engine_verdict(c, hf, size))
    return Planned(file, c, gpus, training(c, e, decision.leaving).bytes / GIB, generating / GIB, verdicts)


def table(plans: Sequence[Planned]) -> Iterator[str]:
    """Markdown table: GPUs, and GiB per GPU at the two peaks."""
    titles = ("configuration", "GPUs", "trainer: TP x PP x DP, expert ranks", "GPUs per engine")
    yield f"| {' | '.join(titles)} | training, GiB | generating, GiB | most of a GPU |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for p in plans:
        c = p.config
        name = f"{p.file.parent.name}/{p.file.name}"
        m = c.megatron
        sizes = (m.tensor_model_parallel_size, m.pipeline_model_parallel_size, c.data_parallel_size)
        shape = " x ".join(map(str, sizes))
        experts = c.megatron.expert_model_parallel_size if c.megatron.expert_model_parallel_size > 1 else "-"
        yield (
            f"| [{name}]({name}) | {p.gpus} {c.cluster.gpu.upper()} | {shape}, {experts} | "
            f"{c.cluster.rollout_num_gpus_per_engine} "
            f"| {p.training_gib:.0f} | {p.generating_gib:.0f} | {p.peak_share:.0%} |"
        )


def page(text: str, rows: Sequence[str]) -> str:
    """`text` with `rows` between its two marks."""
    before, rest = text.split(BEGIN)
    return "\n".join([f"{before}{BEGIN}", *rows, END]) + rest.split(END)[1]


def main(argv: Sequence[str]) -> int:
    """Print or write the table. Returns 1 if a configuration does not fit its GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        plans = [plan(file, Path(folder)) for file in files()]
    rows = list(table(plans))
    print("\n".join(rows))
    for p in plans:
        for verdict in p.verdicts:
            if verdict.startswith(TOO_SMALL):
                print(f"{p.file.parent.name}/{p.file.name} {verdict}", file=sys.stderr)
    if "--write" in argv:
        path = EXAMPLES / "README.md"
        path.write_text(page(path.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return int(not all(p.fits for p in plans))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
