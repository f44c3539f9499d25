"""`python scripts/docs_families.py`: writes the page of measured differences of every model family from its record.

With `--run`, the script first measures: it runs the family tests, which compare tiny models with transformers and with
vLLM on CPUs, and writes the record. The script counts the lines of a family's file when it writes the page. A test
fails if the page differs from the output of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slime.models import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("benchmarks/reports/families_cpu.md")
RECORD = Path("benchmarks/results/families_cpu.json")
COMMAND = "python scripts/docs_families.py"
TESTS = {
    "tests/slime/megatron_backend/model/test_families.py": "compared with transformers on one rank",
    "tests/slime/megatron_backend/model/test_families_parallel.py": "compared with transformers on two ranks",
    "tests/e2e/engines/test_engine_families.py": "compared with vLLM, before and after an update of its weights",
}
ON_ONE = ("logits", "log_probs", "gradients")
ON_TWO = ("tp_log_probs", "ep_log_probs", "tp_gradients", "ep_gradients")
ENGINE = ("engine_before", "engine_after", "engine_again")
TITLE = """# families_cpu

Every family on tiny random models: the differences that the family tests measured.

"""
LEGEND = """
- **logits, log-probs**: the largest difference from transformers, float32, packed sequences of different lengths. The
  limit is 1e-5. "2 ranks" is the larger one of tensor and expert parallelism.
- **gradients**: the largest difference of a parameter's gradient, divided by that gradient's largest value. The limit
  of a test is 1e-4 of each element, or 1e-5 of the largest value, or 1e-6. The last one matters where a whole gradient
  is tiny, as before the norms of Qwen3-Next's delta nets.
- **bits**: on how many layouts of ranks all weights returned bit by bit: one rank, tensor, pipeline, expert parallel.
- **engine**: the mean difference from the log-probs of vLLM: as loaded, after an update, and after the first weights
  again. The limit is 1e-5 in float32 and 0.02 in bfloat16. Empty: this test has no engine
  of the model. Qwen2.5, Qwen3 and GLM-4.5 have engine tests of their own.
- **lines**: those of the family's file in `slime/models/families`.
"""


def measured(lines: list[str]) -> dict[str, dict[str, float]]:
    """Returns model -> quantity -> the largest value that a test printed."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for line in lines:
        note = json.loads(line)
        model = found[note["model"]]
        model[note["what"]] = max(note["value"], model.get(note["what"], 0.0))
    return dict(found)


def run() -> None:
    """Runs the tests, and writes the record if all tests pass."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from operator_bench.machine import describe

    machine, seconds = describe(torch.device("cpu"), ["scripts/docs_families.py", "--run"]), {}
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes.jsonl")
        env = {**os.environ, "VIME_FAMILY_RECORD": str(notes)}
        for test in TESTS:
            start = time.monotonic()
            subprocess.run([sys.executable, "-m", "pytest", "-q", test], cwd=ROOT, env=env, check=True)
            seconds[test] = round(time.monotonic() - start, 1)
        models = measured(notes.read_text(encoding="utf-8").splitlines())
    record = {"machine": machine, "seconds": seconds, "models": models}
    (ROOT / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def lines_of(model_type: str) -> tuple[str, int]:
    """Returns the file of a family, and its number of lines."""
    folder = ROOT / "slime" / "models" / "families"
    (file,) = (
        file
        for file in sorted(folder.rglob("*.py"))
        if file.stem not in ("__init__", "status") and f'"{model_type}"' in file.read_text(encoding="utf-8")
    )
    return file.stem, len(file.read_text(encoding="utf-8").splitlines())


def rows(models: dict[str, dict[str, float]]) -> Iterator[list[str]]:
    """Yields one row per tiny model, in the order of the families."""
    sys.path.insert(0, str(ROOT / "tests" / "slime"))
    from family_cases import CASES

    order = list(FAMILIES)
    for name, case in sorted(CASES.items(), key=lambda item: order.index(item[1].kind)):
        found = models[name]
        file, lines = lines_of(case.kind)
        two = {
            kind: [found[f"{x}_{kind}"] for x in ("tp", "ep") if f"{x}_{kind}" in found]
            for kind in ON_ONE[1:]
        }
        engine = [number(found[key]) for key in ENGINE if key in found]
        bits = [found[key] for key in ("one_bits", "tp_bits", "pp_bits", "ep_bits") if key in found]
        yield [
            FAMILIES[case.kind].title,
            f"`{name}`",
            number(found["logits"]),
            f"{number(found['log_probs'])}, 2 ranks {number(max(two['log_probs']))}",
            f"{number(found['gradients'])}, 2 ranks {number(max(two['gradients']))}",
            f"{int(sum(bits))} of {len(bits)}",
            f"{', '.join(engine)}{f' ({case.dtype})' if engine and case.dtype != 'float32' else ''}",
            f"{lines} (`{file}.py`)",
        ]


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def page() -> str:
    """Returns the whole page, made from the record."""
    record: dict[str, Any] = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
    machine = record["machine"]
    head = ["family", "tiny model", "logits", "log-probs", "gradients", "bits", "engine", "lines"]
    table = [head, ["---"] * len(head), *rows(record["models"])]
    changed = " and changes that are in no commit" if machine["dirty"] else ""
    text = [
        f"- **Hardware** CPU {machine['cpu']}",
        f"- **Versions** Python {machine['python']}, torch {machine['torch']}",
        f"- **Commit** {machine['commit']}{changed}, {machine['date']}",
        *(f"- **{s:.0f} s** {TESTS[test]}: `{test}`" for test, s in record["seconds"].items()),
        *([f"- **Note** {record['note']}"] if "note" in record else []),
        *("", "```bash", machine["command"], "```", ""),
        *(f"| {' | '.join(cells)} |" for cells in table),
    ]
    return TITLE + "\n".join(text) + "\n" + LEGEND


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page of measured differences of every family.")
    parser.add_argument("--run", action="store_true", help="measure first (about three minutes)")
    if parser.parse_args().run:
        run()
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
