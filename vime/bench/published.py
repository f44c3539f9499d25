"""`python -m vime.bench.published [--check]`: docs/benchmarks.md, written from the files of benchmarks/results.

The page says nothing that is not in the files: who adds or changes one runs this again, and a test fails until then.
A result is a file NAME.json of any benchmark, or a directory with the bench.json or operators.json of `vime bench`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from slime.config.kernels import HEADS
from vime.bench import record as records
from vime.bench.compare import Pair, pairs_of, refuse_unlike
from vime.bench.coverage import of_another_switch, without_record
from vime.bench.gpu_numbers import Target, rows, verdict
from vime.bench.gpu_runs import Sources
from vime.bench.operator_pages import in_short, missed_targets, operator_page, pictured
from vime.bench.operator_pictures import case_picture
from vime.bench.operators import OPERATORS_FILE, check
from vime.bench.pictures import figures
from vime.bench.published_tables import (
    audit_lines,
    parallel_in_short,
    parallel_lines,
    result_lines,
    rollout_lines,
)
from vime.bench.record import BASELINE, RECORD_FILE, RL_KERNEL, Record
from vime.bench.report import MOE_LIMIT, TIER_LIMITS, how_to_read, what_ran
from vime.bench.statistics import LEVEL
from vime.bench.tables import IN_A_ROW, cells_of, fallbacks, percentiles, verdicts
from vime.bench.tables import in_short as record_in_short
from vime.bench.verdicts import Comparison, compared, metric_of, number
from vime.plot import save

COMMAND = "python -m vime.bench.published"
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "bench"
RESULTS, PAGE, IMAGES = Path("benchmarks/results"), Path("docs/benchmarks.md"), Path("docs/images")
SECTIONS = {
    "Operators": (TIER_LIMITS["op"], ("operators", "elementwise", "parallel")),
    "A trainer alone": ("Nothing here says how much faster a whole step is.", ("training", "offload")),
    "Full steps": (TIER_LIMITS["e2e"], ("colocated",)),
    "Engines and weights": ("What a rollout and an update of the weights cost.", ("rollout", "weights")),
    "Agreement and learning": ("What trainer and engine say of the same tokens.", ("curves", "audit")),
    "Tests on a GPU": ("", ("tests",)),
    "Others": ("", ()),
}
"""Title -> (what it claims, the files of it by how their names begin); records go where their tier says."""
TIERS = {"module": "A trainer alone", "e2e": "Full steps"}
SHOWN = ("differences", "time_breakdown")
"""Pictures of a record that are on the page."""
LINES = {"parallel": parallel_lines, "rollout": rollout_lines, "audit": audit_lines}
STAMP = "drawn-from"
OLD, MOVED = "vime.benchmarks", " (`vime.benchmarks` is `vime.bench` today)"


@dataclass(frozen=True)
class Result:
    """One measured file. `path`: below RESULTS. `content`: a record, or the JSON object of the file."""

    path: Path
    content: Record | dict[str, Any]
    digest: str

    @property
    def name(self) -> str:
        return self.path.stem if self.path.parent == RESULTS else self.path.parent.name

    @property
    def is_operators(self) -> bool:
        return isinstance(self.content, dict) and {"linear", "elementwise"} <= self.content.keys()

    @property
    def section(self) -> str:
        if isinstance(self.content, Record):
            return TIERS[self.content.tier]
        kind = "operators" if self.is_operators else self.kind
        return next((title for title, (_, kinds) in SECTIONS.items() if kind in kinds), "Others")

    @property
    def kind(self) -> str:
        return self.name.split("_")[0]


def read_results(root: Path) -> list[Result]:
    """All of them, by name. ValueError for one that is not what it has to be."""
    found = []
    paths = [*root.joinpath(RESULTS).glob("*.json"), *root.joinpath(RESULTS).glob("*/*.json")]
    for path in sorted(paths):
        place = path.relative_to(root)
        if path.parent.name != RESULTS.name and path.name not in (RECORD_FILE, OPERATORS_FILE):
            continue
        content: Any = records.read(path.parent) if path.name == RECORD_FILE else _object(path, place)
        found.append(Result(place, content, hashlib.sha256(path.read_bytes()).hexdigest()[:16]))
        if found[-1].is_operators:
            check(content, place)
    return found


def _object(path: Path, place: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} must be JSON, got {error}; copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{place} must hold a JSON object, got {type(content).__name__}; see {RESULTS}")
    return content


def page(results: Sequence[Result]) -> str:
    """The Markdown. The same for the same files: nothing of the day, of this machine or of this commit is in it."""
    text = "\n".join(_lines(results)) + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


def _lines(results: Sequence[Result]) -> Iterator[str]:
    yield from ("# Benchmarks", "")
    yield from _in_short(results)
    for title, (claim, kinds) in SECTIONS.items():
        members = sorted(
            (r for r in results if r.section == title), key=lambda result: result.kind in kinds[1:]
        )
        if members:
            yield from ("", f"## {title}")
        if members and claim:
            yield from ("", claim)
        if any(isinstance(r.content, Record) for r in members):
            summary = f"<summary>How to read the parts with {BASELINE} and {RL_KERNEL}</summary>"
            yield from ("", "<details>", summary, "", *how_to_read(), "", "</details>")
        for result in members:
            yield from ("", f"### {result.name.replace('_', ' ')}", "")
            yield from _part(result)
            yield from ("", f"File: [{result.path}](../{result.path})")


def _in_short(results: Sequence[Result]) -> Iterator[str]:
    """The first screen: the machine, what is fast, what is missed, what nobody measured."""
    plain = [(r.path.name, r.content) for r in results if isinstance(r.content, dict)]
    targets = rows(Sources((), tuple(plain)))
    yield f"Measured on {_machines(results)}. Every part below has its command; what its file did not note is said."
    yield from _table_of_runs([(r.name, r.content) for r in results if isinstance(r.content, Record)])
    yield ""
    yield from in_short([r.content for r in results if r.is_operators and isinstance(r.content, dict)])
    for result in results:
        if result.kind == "parallel" and isinstance(result.content, dict):
            yield from parallel_in_short(result.content)
    found = [row for row in targets if row[1] is not None]
    missed = [row for row in found if verdict(*row[:2]) != "met"]
    if found:
        texts = [_figure_text(*row) for row in missed]
        yield f"- **Targets of runs** {len(found) - len(missed)} met, **{len(missed)} missed**" + (
            f": {'; '.join(texts)}" if missed else ""
        )
    unmeasured = [target.what for target, value, _ in targets if value is None]
    unmeasured += without_record([r.content for r in results if isinstance(r.content, Record)], EXAMPLES)
    if unmeasured:
        yield f"- **Not measured**: {'; '.join(unmeasured)}"
    yield ""
    yield from _figure_table(sorted(found, key=lambda row: verdict(*row[:2]) == "met"))
    yield ""
    yield (
        f"This page is written from [{RESULTS}](../{RESULTS}) by `{COMMAND}`; a test fails when it is not what they "
        "say. Operators, a trainer alone and full steps are claims apart: none follows from another. Commands stand as "
        f"they were typed at their commit{MOVED if any(OLD in json.dumps(c) for _, c in plain) else ''}. How to "
        "measure: [benchmarks/README.md](../benchmarks/README.md)."
    )


def _baseline(measured: Sequence[Record]) -> str:
    """What the runs are faster than."""
    sides = [set(r.switch[BASELINE]) for r in measured if r.switch["field"] == "rl_kernel_ops"]
    if not any(side.isdisjoint(HEADS) for side in sides):
        return ""
    fused = any(not side.isdisjoint(HEADS) for side in sides)
    return (
        " The baseline is Megatron's cross entropy of float32 logits beside an entropy in plain PyTorch (`native "
        "+entropy` among the operators), neither fused nor compiled, but where its part says otherwise."
        + ("" if fused else " Beside a fused or compiled head there is no record.")
    )


def _table_of_runs(measured: Sequence[tuple[str, Record]]) -> Iterator[str]:
    """What they are beside, then a row a record."""
    if not measured:
        return
    yield ""
    yield (
        f"**Runs**, {BASELINE} to {RL_KERNEL}: the difference with its {100 * LEVEL:.0f} % interval over pairs, bold "
        "where it is shown. A step holds a rollout, in which no switched kernel runs: why it differs is not shown."
        + _baseline([record for _, record in measured])
    )
    yield ""
    yield f"| run | {' | '.join(metric_of(name).label for name in IN_A_ROW)} |"
    yield "| --- |" + " --- |" * len(IN_A_ROW)
    for tier, title in TIERS.items():
        for name, record in measured:
            if record.tier == tier:
                cells = cells_of(record, _judged(record)[2])
                yield f"| [{title.lower()}](#{_anchor(name)}): {record.claim} | {' | '.join(cells)} |"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-").replace("_", "-")


def _machines(results: Sequence[Result]) -> str:
    """The GPUs that the files name, with the drivers that they noted."""
    drivers: dict[str, set[str]] = {}
    for result in results:
        if isinstance(result.content, Record):
            for gpu in result.content.sides[BASELINE][0].environment.get("gpus") or []:
                drivers.setdefault(gpu["name"], set()).add(gpu["driver"])
            continue
        machine = result.content.get("machine", {})
        if name := result.content.get("gpu", machine.get("gpu")):
            noted = result.content.get("driver", machine.get("gpu_facts", {}).get("driver_version"))
            drivers.setdefault(name, set()).update([noted] if noted else [])
    said = [
        f"**{name}**" + (f" (driver {', '.join(sorted(d))} where noted)" if d else "")
        for name, d in drivers.items()
    ]
    return "; ".join(said) or "machines that the files do not name"


def _figure_text(target: Target, value: float, source: str) -> str:
    name = Path(source).stem
    place = f"[{name.replace('_', ' ')}](#{_anchor(name)})"
    return f"{target.what} {_measured(target, value)} ({_limit(target)}, {verdict(target, value)}) in {place}"


def _measured(target: Target, value: float) -> str:
    if math.isinf(value):
        return "infinite (by a noise of 0)"
    return f"{number(value, digits=3)} {target.unit}".strip()


def _limit(target: Target) -> str:
    return f"{'at least' if target.above else 'at most'} {target.limit:g}"


def _figure_table(found: Sequence[tuple[Target, float | None, str]]) -> list[str]:
    lines = ["| figure | measured | target | | from |", "| --- | ---: | ---: | --- | --- |"]
    for target, value, source in found:
        words = verdict(target, value)
        assert value is not None
        cells = [_measured(target, value), _limit(target), words if words == "met" else f"**{words}**"]
        lines.append(
            f"| {target.what} | {' | '.join(cells)} | [{Path(source).stem}](../{RESULTS / source}) |"
        )
    return lines if found else []


def _part(result: Result) -> Iterator[str]:
    content = result.content
    if isinstance(content, Record):
        yield from _record_lines(result.name, content)
        return
    if result.is_operators:
        case = pictured(content)
        link = case and f"![{case.name}: time of a call](images/{_file_name(result.name, case.name)})"
        yield from operator_page(content, link)
        yield from missed_targets(content)
        return
    targets = [row for row in rows(Sources((), ((result.path.name, content),))) if row[1] is not None]
    yield from LINES.get(result.kind, result_lines)(content, _figure_table(targets))


def _judged(record: Record) -> tuple[list[Pair], list[str], list[Comparison]]:
    """(pairs, what was left out, every metric compared) of a record. ValueError for runs that are not alike."""
    pairs, left_out = pairs_of(record)
    refuse_unlike(record, pairs)
    return pairs, left_out, compared(record, pairs)


def _record_lines(name: str, record: Record) -> Iterator[str]:
    """Both sides of the switch: what `vime bench report` shows, without its configuration and with fewer pictures."""
    pairs, left_out, found = _judged(record)
    yield from (f"{record.claim}.", "")
    if record.experts:
        yield from (MOE_LIMIT, "")
    yield from what_ran(record, pairs, left_out, found, of_another_switch(record, EXAMPLES))
    yield from record_in_short(record, found)
    for picture, (caption, drawn) in figures(record, pairs, found).items():
        if picture in SHOWN and not isinstance(drawn, str):
            yield from ("", f"![{caption}](images/{_file_name(name, picture)})")
    yield from ("", "<details>", "<summary>All metrics</summary>")
    yield from (*verdicts(found), *percentiles(record, found), *fallbacks(pairs))
    yield from ("", "</details>")


def _file_name(result: str, picture: str) -> str:
    return f"{result}-{picture}.png".replace("_", "-")


def pictures(results: Sequence[Result]) -> dict[Path, tuple[str, partial[Path]]]:
    """Path below the root -> (digest of the file that it shows, how to draw it to a path)."""
    found = {}
    for result in results:
        if isinstance(result.content, Record):
            pairs, _, comparisons = _judged(result.content)
            drawn = figures(result.content, pairs, comparisons)
            for name in SHOWN:
                if not isinstance(figure := drawn[name][1], str):
                    found[IMAGES / _file_name(result.name, name)] = result.digest, partial(save, figure)
        elif result.is_operators and (case := pictured(result.content)) is not None:
            draw = partial(save, case_picture(case))
            found[IMAGES / _file_name(result.name, case.name)] = result.digest, draw
    return found


def stale(root: Path, results: Sequence[Result]) -> list[str]:
    """What is not as the files say, each with its path. Of a picture the data counts, not its bytes: they depend on the
    fonts and the matplotlib of a machine."""
    found = []
    if not (root / PAGE).is_file() or (root / PAGE).read_text(encoding="utf-8") != page(results):
        found.append(f"{PAGE} is not what {RESULTS} say")
    for path, (digest, _) in pictures(results).items():
        if not (root / path).is_file() or Image.open(root / path).info.get(STAMP) != digest:
            found.append(f"{path} was not drawn from its file as it is")
    return found


def write(root: Path, results: Sequence[Result]) -> list[Path]:
    """The page and its pictures; returns what was written."""
    (root / IMAGES).mkdir(parents=True, exist_ok=True)
    (root / PAGE).write_text(page(results), encoding="utf-8")
    for path, (digest, draw) in pictures(results).items():
        draw(root / path)
        info = PngInfo()
        info.add_text(STAMP, digest)
        with Image.open(root / path) as picture:
            picture.save(root / path, pnginfo=info, optimize=True)
    return [PAGE, *pictures(results)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=f"Write {PAGE} from {RESULTS}.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when something is stale")
    arguments = parser.parse_args(argv)
    try:
        results = read_results(ROOT)
        if arguments.check:
            found = stale(ROOT, results)
            print("\n".join([*found, f"run {COMMAND}"] if found else [f"{PAGE} is what {RESULTS} say"]))
            return 1 if found else 0
        print(*write(ROOT, results), sep="\n")
    except ValueError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
