"""`vime bench report DIR [DIR ...] [--out DIR]`: bench.json -> report.md with its pictures. Owns the report's text.

Operators, modules and full steps have a section each and share no table: what an operator gains is not what a step
gains. Runs that differ in more than the switch are refused (vime.bench.compare), before anything is written.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vime.bench import record as records
from vime.bench.compare import EXCEPTED, Pair, in_order, pairs_of, refuse_unlike
from vime.bench.operator_tables import operator_lines
from vime.bench.operators import OPERATORS_FILE, has_operators, read_operators
from vime.bench.pictures import Picture, draw_pictures
from vime.bench.record import BASELINE, RL_KERNEL, SIDES, Record, Repeat
from vime.bench.statistics import LEVEL, MIN_PAIRS
from vime.bench.tables import fallbacks, in_short, minds, percentiles, verdicts
from vime.bench.verdicts import Comparison, compared, number
from vime.bench.where import facts, folded, rollouts_of

REPORT_FILE = "report.md"
TIER_TITLES = {"op": "Operators", "module": "Modules", "e2e": "Full steps"}
TIER_LIMITS = {
    "op": "One operator at a time. Nothing here says how much faster a training step is.",
    "module": "A trainer alone, on rollouts that were saved: waiting for one is reading its file. Nothing here says "
    "how much faster a whole step is.",
    "e2e": "Whole steps: rollout, training and weight transfer.",
}
MOE_LIMIT = "Nothing here is a claim about the kernels of experts or routers."


@dataclass(frozen=True)
class Findings:
    """A record as its part of the report shows it."""

    record: Record
    pairs: list[Pair]
    left_out: list[str]
    comparisons: list[Comparison]
    pictures: list[Picture]
    not_drawn: list[str]


def main(argv: Sequence[str]) -> int:
    """Entry of `vime bench report`; ValueError for directories whose runs may not be compared."""
    parser = argparse.ArgumentParser(
        prog="vime bench report", description="Baseline against rl_kernel, as Markdown with pictures."
    )
    parser.add_argument(
        "dirs", nargs="+", type=Path, metavar="DIR", help=f"with {records.RECORD_FILE} or {OPERATORS_FILE}"
    )
    parser.add_argument(
        "--out", type=Path, help="where to write; default DIR/report, required for several DIRs"
    )
    args = parser.parse_args(argv)
    if args.out is None and len(args.dirs) > 1:
        raise ValueError(f"--out must be given for several DIRs, got {len(args.dirs)} directories; name one")
    for path in args.dirs:
        if not path.is_dir():
            raise ValueError(
                f"DIR must be a directory with {records.RECORD_FILE} or {OPERATORS_FILE}, got {path}; "
                "docs/benchmarks.md shows the files of benchmarks/results"
            )
    operators = [read_operators(path) for path in args.dirs if has_operators(path)]
    both = [path for path in args.dirs if (path / records.RECORD_FILE).is_file() or not has_operators(path)]
    benchmarks = [records.read(path) for path in both]
    for path in write_report(benchmarks, args.out or args.dirs[0] / "report", operators):
        print(path)
    return 0


def write_report(
    benchmarks: Sequence[Record], out: Path, operators: Sequence[dict[str, Any]] = ()
) -> list[Path]:
    """Write report.md and the pictures to `out`; returns what was written. ValueError for a record not to compare.

    `operators`: contents of operators.json, which belong to the section of the operators.
    """
    judged = []
    for record in benchmarks:
        pairs, left_out = pairs_of(record)
        refuse_unlike(record, pairs)
        judged.append((record, pairs, left_out))
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for i, (record, pairs, left_out) in enumerate(judged, 1):
        comparisons = compared(record, pairs)
        prefix = f"{i}-{record.tier}-{re.sub(r'[^A-Za-z0-9.]+', '-', record.name).strip('-')}"
        pictures, not_drawn = draw_pictures(record, pairs, comparisons, out, prefix)
        found.append(Findings(record, pairs, left_out, comparisons, pictures, not_drawn))
    drawn: list[Path] = []
    benched = [
        line
        for i, content in enumerate(operators, 1)
        for line in operator_lines(content, out, f"operators-{i}", drawn)
    ]
    path = out / REPORT_FILE
    path.write_text("\n".join(_lines(found, benched)) + "\n", encoding="utf-8")
    return [path, *drawn, *(out / picture.file for each in found for picture in each.pictures)]


def _lines(found: Sequence[Findings], benched: Sequence[str]) -> Iterator[str]:
    yield f"# {BASELINE} against {RL_KERNEL}"
    yield ""
    yield from how_to_read()
    for tier, title in TIER_TITLES.items():
        of_tier = [each for each in found if each.record.tier == tier]
        lines = benched if tier == "op" else []
        if of_tier or lines:
            yield from ("", f"## {title}", "", TIER_LIMITS[tier])
        yield from lines
        for each in of_tier:
            yield from _part(each)


def how_to_read() -> Iterator[str]:
    """What the words and figures of a comparison mean."""
    level = f"{100 * LEVEL:.0f} %"
    yield (
        f"**Difference** is {RL_KERNEL} less {BASELINE}, of means: of times and speeds over the steps after the "
        "warm-up (a speed: all tokens by all seconds), of numbers over all steps; of memory it is the highest peak of "
        "all steps. Times, speeds and memory are averaged over repeats geometrically and compared in percent of "
        f"{BASELINE}, other metrics in their unit. Repeat i of a side pairs with repeat i of the other; a step that "
        "one of them did not report counts in neither. **±** is the standard deviation of the repeats' means."
    )
    yield ""
    yield (
        f"**Intervals** ({level}) are Student's t over the differences of {MIN_PAIRS} pairs or more, and hold for runs "
        "like these. Of fewer there is none, and no verdict but on what is the same in every repeat: how much two runs "
        "of one side differ is not known, and steps of one run do not tell. A difference is shown when its interval "
        "does not hold zero."
    )
    yield ""
    yield (
        "**Where operators are the switch,** of times and speeds only training and its passes are said to be faster or "
        "slower: they hold the operators. Of rollouts, hand-overs, weights to engines, and of whole steps, which hold "
        "them, the cause is not shown. In a model of reduced depth the LM head is a larger share of a step than in the "
        "whole model: percentages are of that depth alone."
    )
    yield ""
    yield (
        f"Each verdict stands at {level} by itself: of 20 metrics without any difference one is called different by "
        "chance. *No difference shown* is not *the same*: *within* says how large a difference is still possible."
    )


def _part(found: Findings) -> Iterator[str]:
    """One record, from its title to its configuration."""
    record = found.record
    yield from ("", f"### {record.claim}", "")
    if record.experts:
        yield from (MOE_LIMIT, "")
    yield from what_ran(record, found.pairs, found.left_out, found.comparisons)
    yield from in_short(record, found.comparisons)
    yield from verdicts(found.comparisons)
    yield from percentiles(record, found.comparisons)
    yield from _pictures(found)
    yield from fallbacks(found.pairs)
    yield from _full(record, found.pairs[0][0])


def what_ran(
    record: Record,
    pairs: Sequence[Pair],
    left_out: Sequence[str],
    comparisons: Sequence[Comparison],
    more: Sequence[str] = (),
) -> Iterator[str]:
    """Switch, rollouts, counts, order, machine, command, and what has to be known to read what follows, `more` too."""
    switch = record.switch
    preset = "" if record.preset is None else f", preset {record.preset}"
    sides = ", ".join(f"`{_switched(switch[side])}` in {side}" for side in SIDES)
    yield f"- **Benchmark** {record.name}{preset}; `{switch['field']}` is {sides}"
    yield from (f"- **Rollouts** {text}" for text in rollouts_of(pairs[0][0].config))
    steps = sorted({len(repeat.steps) - record.warm_up for pair in pairs for repeat in pair})
    warm_up = f", after {record.warm_up} of warm-up" if record.warm_up else ""
    counts = " to ".join(str(count) for count in dict.fromkeys((steps[0], steps[-1])))
    yield (
        f"- **Counted** {_plural(len(pairs), 'pair')} of repeats, {counts} {_word(steps[-1], 'step')} each"
        + warm_up
    )
    baselines = {id(repeat) for repeat, _ in pairs}
    order = " ".join(BASELINE[0] if id(repeat) in baselines else RL_KERNEL[0] for repeat in in_order(pairs))
    starts = [[datetime.fromisoformat(each.environment["time"]) for each in pair] for pair in pairs]
    minutes = max(abs(b - a).total_seconds() / 60 for a, b in starts)
    yield (
        f"- **Order** {order} ({BASELINE[0]}: {BASELINE}, {RL_KERNEL[0]}: {RL_KERNEL}); the runs of a pair started up "
        f"to {number(minutes, digits=2)} min apart"
    )
    yield from (f"- **{name}** {text}" for name, text in facts(pairs[0][0].environment, pairs[0][0].config))
    yield from (f"- **Note** {note}" for note in record.notes)
    yield from (*minds(record, pairs, comparisons), *(f"- **Mind** {text}" for text in more))
    yield from (f"- **Left out** {text}" for text in left_out)
    yield from ("", "```bash", record.command, "```")


def _switched(value: Any) -> str:
    """The value of a switch as it is typed."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _pictures(found: Findings) -> Iterator[str]:
    if found.pictures or found.not_drawn:
        yield from ("", "#### Pictures", "")
    yield "\n\n".join(f"![{picture.caption}]({picture.file})" for picture in found.pictures)
    if found.not_drawn:
        yield ""
    yield from (f"- {note}" for note in found.not_drawn)


def _full(record: Record, repeat: Repeat) -> Iterator[str]:
    """Configuration and environment in full, folded; of the first baseline, as the others are equal but for paths."""
    excepted = ", ".join(name for name, _ in EXCEPTED)
    if repeat.config:
        yield from folded(
            f"Resolved configuration of {repeat.run} (equal in all runs, but for {record.switch['field']}, the seeds "
            f"of a pair and where a run writes: {excepted})",
            repeat.config,
        )
    yield from folded(f"Environment of {repeat.run}", repeat.environment)


def _plural(count: int, word: str) -> str:
    return f"{count} {_word(count, word)}"


def _word(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
