"""Plan every configuration of examples/ without weights, and write the tables of their memory into examples/README.md.

python scripts/plan_examples.py            print the tables
python scripts/plan_examples.py --write    print them and write them into examples/README.md
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from make_model import ARCHITECTURES, VISION_ARCHITECTURES, build_config

from slime.checkpoints.checkpoint_dir import HF_INDEX
from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.hardware import HARDWARE
from slime.plan.card_phases import BESIDES_GENERATING, list_engine_moments, training
from slime.plan.memory_decision import TOO_SMALL, decide_residence
from slime.plan.memory_estimate import estimate
from slime.plan.model_shape import Shape
from slime.plan.units import GIB
from slime.roles import get_roles
from vime.backends import parse_config
from vime.vllm.memory import engine_memory, engine_verdict

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LAYOUTS, AFTER = "planned", "planned algorithms"
"""Names of the two tables in their marks."""
MODELS = {**ARCHITECTURES, **VISION_ARCHITECTURES}
"""Shapes of all models with examples."""
ALGORITHMS = {
    "curriculum": "config.yaml",
    "dapo": "config.yaml",
    "dpo": "dpo.yaml",
    "mismatch-correction": "config.yaml",
    "opd": "opd.yaml",
    "ppo-critic": "ppo.yaml",
    "rloo": "config.yaml",
}
"""Folder of an algorithm -> its file of flags."""
LAYOUT = "qwen3-4b/colocated.yaml"
"""Layout before the flags of an algorithm. A teacher has the shape of its model."""


@dataclass(frozen=True)
class Planned:
    """One configuration on its GPUs. `verdicts` come from `vime plan`. Sizes are per GPU."""

    file: Path
    config: Config
    gpus: int
    training_gib: float
    generating_gib: float
    verdicts: tuple[str, ...]
    name: str
    """Name of the row: the file in examples/."""

    @property
    def memory_gib(self) -> float:
        return HARDWARE[self.config.cluster.gpu].memory_gib

    @property
    def peak_share(self) -> float:
        """Share of the GPU's memory in use at the peak. Without engines, the peak is in training."""
        generating = 0.0 if self.config.debug.debug_train_only else self.generating_gib
        return max(self.training_gib, generating) / self.memory_gib

    @property
    def fits(self) -> bool:
        return not any(verdict.startswith(TOO_SMALL) for verdict in self.verdicts)


def files() -> list[Path]:
    """Returns every layout, sorted by model."""
    return sorted(path for path in EXAMPLES.glob("*/*.yaml") if path.parent.name in MODELS)


def flags(file: Path, model: Path) -> list[str]:
    """Returns the command line of an example, with the model and prompts in `model`."""
    configs = ("--config", str(EXAMPLES / "grpo.yaml"), str(file))
    rewards = ("--input-key", "prompt", "--label-key", "label", "--rm-type", "deepscaler")
    return [*configs, "--hf-checkpoint", str(model), "--prompt-data", str(model / "prompts.jsonl"), *rewards]


def write_model(arch: str, folder: Path) -> Path:
    """Writes config.json and one prompt, the files that a plan reads."""
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


def algorithm_flags(name: str, model: Path, folder: Path) -> list[str]:
    """Returns the command line of an algorithm after LAYOUT. It has the flags of the algorithm's file without the flags
    of machine and data in examples/tiny.yaml, and all samples of a rollout in its number of steps."""
    shared, tiny, own = (
        yaml.safe_load((EXAMPLES / path).read_text(encoding="utf-8"))
        for path in ("grpo.yaml", "tiny.yaml", f"{name}/{ALGORITHMS[name]}")
    )
    own = {flag: own[flag] for flag in own.keys() - (tiny.keys() - {"n-samples-per-prompt"})}
    samples = shared["rollout-batch-size"] * {**shared, **own}["n-samples-per-prompt"]
    own["global-batch-size"] = samples // own.get("num-steps-per-rollout", 1)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(own), encoding="utf-8")
    argv = flags(EXAMPLES / LAYOUT, model)
    if own.get("opd-type") == "megatron":
        teacher = shutil.copytree(model, folder / "teacher")
        (teacher / HF_INDEX).write_text('{"weight_map": {}}', encoding="utf-8")
        argv += ["--opd-teacher-load", str(teacher)]
    return [*argv[:3], str(file), *argv[3:]]


def plan(file: Path, folder: Path) -> Planned:
    """Returns the estimates of a layout."""
    model = write_model(file.parent.name, folder)
    return planned(f"{file.parent.name}/{file.name}", file, flags(file, model), model)


def plan_algorithm(name: str, folder: Path) -> Planned:
    """Returns the estimates of an algorithm after LAYOUT."""
    file = EXAMPLES / name / ALGORITHMS[name]
    model = write_model(Path(LAYOUT).parent.name, folder)
    return planned(f"{name}/{file.name}", file, algorithm_flags(name, model, folder), model)


def planned(name: str, file: Path, argv: Sequence[str], model: Path) -> Planned:
    """Returns the estimates of a command line. `vime plan` and a run use the same estimates."""
    c = parse_config(argv)
    hf, size = read_hf_config(str(model)), HARDWARE[c.cluster.gpu].memory_gib * GIB
    e, decision = estimate(c, hf), None
    decision = decide_residence(c, e, size)
    if c.cluster.colocate:
        generating = max(moment.bytes for moment in list_engine_moments(c, e, decision.leaving, size))
    else:
        weights, _token, *cache = engine_memory(c, Shape.of(hf))
        share = c.engine.backend_args["gpu_memory_utilization"] * size
        generating = min(share, weights.bytes + sum(item.bytes for item in cache) + BESIDES_GENERATING)
    gpus = c.world_size + (0 if c.cluster.colocate else c.cluster.rollout_num_gpus)
    verdicts = (*(line for line in decision.lines if "fit" in line), engine_verdict(c, hf, size))
    return Planned(
        file, c, gpus, training(c, e, decision.leaving).bytes / GIB, generating / GIB, verdicts, name
    )


def table(plans: Sequence[Planned]) -> Iterator[str]:
    """Yields a Markdown table with GPUs, and GiB per GPU at the two peaks."""
    titles = ("configuration", "GPUs", "trainer: TP x PP x DP, expert ranks", "GPUs per engine")
    yield f"| {' | '.join(titles)} | training, GiB | generating, GiB | most of a GPU |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for p in plans:
        c = p.config
        m = c.megatron
        sizes = (m.tensor_model_parallel_size, m.pipeline_model_parallel_size, c.data_parallel_size)
        shape = " x ".join(map(str, sizes))
        experts = c.megatron.expert_model_parallel_size if c.megatron.expert_model_parallel_size > 1 else "-"
        yield (
            f"| [{p.name}]({p.name}) | {p.gpus} {c.cluster.gpu.upper()} | {shape}, {experts} | "
            f"{c.cluster.rollout_num_gpus_per_engine} "
            f"| {p.training_gib:.0f} | {p.generating_gib:.0f} | {p.peak_share:.0%} |"
        )


def algorithm_table(plans: Sequence[Planned]) -> Iterator[str]:
    """Yields a Markdown table of algorithms after LAYOUT, in GiB per GPU."""
    yield "| algorithm | models | training, GiB | generating, GiB | most of a GPU |"
    yield "| --- | --- | --- | --- | --- |"
    for p in plans:
        models = ", ".join(role.name for role in get_roles(p.config))
        generating = "-" if p.config.debug.debug_train_only else f"{p.generating_gib:.0f}"
        cells = (models, f"{p.training_gib:.0f}", generating, f"{p.peak_share:.0%}")
        yield f"| [{p.name}]({p.name}) | {' | '.join(cells)} |"


def marks(name: str) -> tuple[str, str]:
    """Returns the lines before and after a table."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def page(text: str, plans: Sequence[Planned], algorithms: Sequence[Planned]) -> str:
    """Returns `text` with both tables between their marks."""
    for name, rows in ((LAYOUTS, table(plans)), (AFTER, algorithm_table(algorithms))):
        begin, end = marks(name)
        before, rest = text.split(begin)
        text = "\n".join([f"{before}{begin}", *rows, end]) + rest.split(end)[1]
    return text


def main(argv: Sequence[str]) -> int:
    """Prints or writes the tables. Returns 1 if a configuration does not fit its GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        plans = [plan(file, Path(folder)) for file in files()]
        algorithms = [plan_algorithm(name, Path(folder)) for name in ALGORITHMS]
    print("\n".join([*table(plans), "", *algorithm_table(algorithms)]))
    for p in (*plans, *algorithms):
        for verdict in p.verdicts:
            if verdict.startswith(TOO_SMALL):
                print(f"{p.name} {verdict}", file=sys.stderr)
    if "--write" in argv:
        path = EXAMPLES / "README.md"
        path.write_text(page(path.read_text(encoding="utf-8"), plans, algorithms), encoding="utf-8")
    return int(not all(p.fits for p in (*plans, *algorithms)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
