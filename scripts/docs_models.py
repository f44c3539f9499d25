"""`python scripts/docs_models.py`: writes the tables of model families in README.md, docs/models.md and docs/status.md.

The tables come from slime/models/status.py. The table of the newest families also has the differences of
benchmarks/results/families_cpu.json. Each table is between two marks. A test fails if a page differs from the output
of this script.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slime.models import FAMILIES
from slime.models.status import PLANNED, STATUS

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python scripts/docs_models.py"
BEGIN, END = "<!-- {}: begin, written by scripts/docs_models.py -->", "<!-- {}: end -->"
RECORD = Path("benchmarks/results/families_cpu.json")

Row = Sequence[str]

NEWEST: dict[str, tuple[str, ...]] = {
    "Gemma 4": (
        *("gemma4_text gemma4", "gemma4 gemma4-moe gemma4-published", "46ef71b1, d9c02813", "3 and 20"),
        "towers; E2B and E4B (embeddings per layer, shared keys and values)",
    ),
    "OLMo 3": ("olmo3", "olmo3", "26f8fcbf", "1 and 5", ""),
    "Qwen3.5 and 3.6": (
        "qwen3_5_text qwen3_5_moe_text qwen3_5 qwen3_5_moe",
        "qwen3-5 qwen3-5-text qwen3-5-moe qwen3-5-moe-text",
        *("281c239d, de4ab3ce", "2 and 7"),
        "engines on CPUs in float32 or with images",
    ),
    "GLM-5": (
        *("glm_moe_dsa", "glm-5 glm-5-shared", "21dff1df, for three families", "6 and 22"),
        "a kernel for sparse attention in the trainer, the KL loss of an indexer, engines on CPUs beyond `index_topk`",
    ),
    "DeepSeek-V3.2": ("deepseek_v32", "deepseek-v32", "21dff1df", "the same", "as GLM-5"),
    "Kimi K2.5": ("kimi_k25", "kimi-k2-5", "21dff1df", "the same", "the vision tower"),
    "MiniMax-M2": (
        *("minimax_m2", "minimax-m2", "6dabfba6, for five families", "5 and 4"),
        "",
    ),
}
"""Family -> (values of model_type, tiny models of the record, commits that added it, new and changed files of
rl_kernel, slime and vime in these commits, what it lacks)."""
ON_ENGINE = ("engine_before", "engine_after", "engine_again")


def by_maker() -> Iterator[Row]:
    """Yields the rows of README.md, one per maker."""
    yield ("name", "families", "run on CPUs", "run on GPUs")
    for maker in dict.fromkeys(status.maker for status in STATUS.values()):
        types = [name for name, status in STATUS.items() if status.maker == maker]
        cpu = ["tiny models", *(STATUS[name].larger for name in types if STATUS[name].larger)]
        if narrow := titles([name for name in types if STATUS[name].engine != "float32"]):
            cpu.append(f"engines of {narrow} in bfloat16")
        ran = dict.fromkeys(STATUS[name].gpu for name in types if STATUS[name].gpu != PLANNED)
        yield (maker, titles(types), "; ".join(cpu), "; ".join(ran) or PLANNED)


def titles(types: Sequence[str]) -> str:
    """Returns the names of the families with these `model_type`s, each name once."""
    return ", ".join(dict.fromkeys(FAMILIES[name].title.partition(",")[0] for name in types))


def by_family() -> Iterator[Row]:
    """Yields the rows of docs/models.md, one per `model_type`."""
    yield ("Family", "`model_type`", "Models", "Configurations")
    for name, family in FAMILIES.items():
        example = STATUS[name].example
        yield (family.title, f"`{name}`", family.models, f"[{example}](../examples/{example}/README.md)")


def by_run() -> Iterator[Row]:
    """Yields the rows of docs/status.md, which list each family's runs."""
    yield ("Family", "`model_type`", "Log-probs compared with vLLM", "GRPO steps on a CPU", "On a GPU")
    for name, family in FAMILIES.items():
        status = STATUS[name]
        more = f", and {status.larger}" if status.larger else ""
        steps = f"yes{more}" if status.steps else "no"
        yield (family.title, f"`{name}`", status.engine, steps, status.gpu)


def by_newest() -> Iterator[Row]:
    """Yields the rows of docs/models.md on the newest families, with the largest differences of their tiny models."""
    found = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))["models"]
    yield (
        *("Family", "Commits", "New and changed files", "Logits", "Gradients", "Engine"),
        *("GRPO steps on a CPU", "On a GPU", "Lacks"),
    )
    for name, (types, models, commits, files, lacks) in NEWEST.items():
        rows = [found[model] for model in models.split()]
        statuses = [STATUS[kind] for kind in types.split()]
        (dtype,) = {status.engine for status in statuses}
        engine = f"{largest(rows, ON_ENGINE)}" + f" ({dtype})" * (dtype != "float32")
        gradients = largest(rows, ("gradients", "tp_gradients", "ep_gradients"))
        steps = "yes" if any(status.steps for status in statuses) else "no"
        gpu = "; ".join(dict.fromkeys(status.gpu for status in statuses))
        yield (name, commits, files, largest(rows, ("logits",)), gradients, engine, steps, gpu, lacks)


def largest(rows: Sequence[dict[str, float]], names: Sequence[str]) -> str:
    """Returns the largest of the named differences over some tiny models."""
    return f"{max(row[name] for row in rows for name in names if name in row):.1e}"


TABLES: dict[Path, dict[str, Callable[[], Iterator[Row]]]] = {
    Path("README.md"): {"families": by_maker},
    Path("docs/models.md"): {"families": by_family, "newest families": by_newest},
    Path("docs/status.md"): {"families": by_run},
}


def page(path: Path) -> str:
    """Returns a page with its tables between their marks."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for name, rows in TABLES[path].items():
        head, *body = rows()
        table = [head, ["---"] * len(head), *body]
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        lines = [f"| {' | '.join(cells)} |" for cells in table]
        text = "\n".join([f"{before}{begin}", *lines, end]) + rest.split(end)[1]
    return text


if __name__ == "__main__":
    for path in TABLES:
        (ROOT / path).write_text(page(path), encoding="utf-8")
        print(path)
