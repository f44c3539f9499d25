"""`vime bench report DIR [DIR ...] [--out DIR]`: writes report.md with pictures from bench.json.

Operators, modules and full steps have separate sections, because an operator's gain differs from a step's gain. Runs
that differ in more than the switch are an error (switch_bench.compare), before any file is written.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from operator_bench.pairs import check
from operator_bench.report import result_lines

from slime.config.secrets import mask_secrets
from switch_bench import record as records
from switch_bench.compare import Pair, cautions, in_order, pairs_of, refuse_unlike
from switch_bench.pictures import draw_pictures
from switch_bench.record import BASELINE, OPERATORS_FILE, RL_KERNEL, SIDES, Record
from switch_bench.tables import evaluation_lines, percentile_lines
from switch_bench.verdicts import WHOLE_OF, Comparison, amount, bare, compared, metric_of, verdict, with_unit
from vime.view.measures import EXCEPTED, METRICS, PASS_TIME, config_flags, flatten, number
from vime.view.statistics import LEVEL, MIN_PAIRS, Difference, Summary

TIERS = {
    "op": ("Operators", "One operator at a time. Nothing here says how much faster a training step is."),
    "module": (
        "Modules",
        "A trainer alone, on saved rollouts: waiting for one is reading its file. Nothing here says how much faster a "
        "whole step is.",
    ),
    "e2e": ("Full steps", "Whole steps: rollout, training and weight transfer."),
}
MOST_PAIRS = 6
"""Largest number of pairs that a row lists. With more pairs, it has the smallest and the largest difference."""
INTERVAL = f"{100 * LEVEL:.0f} % interval"
HOW_TO_READ = (
    f"**Difference** is {RL_KERNEL} minus {BASELINE}, of means: of times and speeds over the steps after the warm-up, "
    "of numbers over all steps; of memory it is the highest peak. Times, speeds and memory are averaged over repeats "
    f"geometrically and compared in percent. Repeat i of a side pairs with repeat i of the other. The {INTERVAL} is "
    f"Student's over the pairs, from {MIN_PAIRS} pairs on; with fewer there is no verdict. A difference is shown when "
    "its interval does not contain zero. *No difference shown* is not *the same*: *within* is the difference that is "
    "still possible. Of 20 metrics without any difference one is called different by chance. A verdict says that the "
    "sides differ, not why: a whole step contains rollouts, in which no operator of rl_kernel runs. **±** is the "
    "standard deviation of the repeats' means."
)
PACKAGES = ("torch", "triton", "vllm", "vllm-router", "megatron-core", "transformers", "ray", "numpy")


def main(argv: Sequence[str]) -> int:
    """Runs `vime bench report`. ValueError for directories whose runs cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="vime bench report", description="Baseline compared with rl_kernel, as Markdown with pictures."
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
                "docs/benchmarks.md shows what such a directory holds"
            )
    operators = [path / OPERATORS_FILE for path in args.dirs if (path / OPERATORS_FILE).is_file()]
    runs = [
        p for p in args.dirs if (p / records.RECORD_FILE).is_file() or p / OPERATORS_FILE not in operators
    ]
    contents = [records.read_json(path, "measure again") for path in operators]
    for content, path in zip(contents, operators, strict=True):
        check(content, path)
    benchmarks = [records.read(path) for path in runs]
    for path in write_report(benchmarks, args.out or args.dirs[0] / "report", contents):
        print(path)
    return 0


def write_report(
    benchmarks: Sequence[Record], out: Path, operators: Sequence[Mapping[str, Any]] = ()
) -> list[Path]:
    """Writes report.md and the pictures to `out`, and returns the files. ValueError for runs that cannot be
    compared."""
    judged = [(record, *pairs_of(record)) for record in benchmarks]
    for record, pairs, _ in judged:
        refuse_unlike(record.name, record.switch, pairs)
    out.mkdir(parents=True, exist_ok=True)
    path, drawn = out / "report.md", list[Path]()
    parts: dict[str, list[str]] = {tier: [] for tier in TIERS}
    for content in operators:
        parts["op"] += ["", f"### operator_bench: {RL_KERNEL} and other implementations", ""]
        parts["op"] += result_lines(content)
        parts["op"] += folded("Environment", content["machine"])
    for i, (record, pairs, left_out) in enumerate(judged, 1):
        found = compared(record, pairs)
        prefix = f"{i}-{record.tier}-{re.sub(r'[^A-Za-z0-9.]+', '-', record.name).strip('-')}"
        pictures, notes = draw_pictures(record, pairs, found, out, prefix)
        drawn += pictures.values()
        parts[record.tier] += record_lines(record, pairs, left_out, found)
        parts[record.tier] += (f"\n![{caption}]({file.name})" for caption, file in pictures.items())
        parts[record.tier] += ["", *(f"- {note}" for note in notes), *in_full(record, pairs)]
    lines = [f"# {BASELINE} compared with {RL_KERNEL}", "", HOW_TO_READ]
    for tier, (title, claim) in TIERS.items():
        lines += ["", f"## {title}", "", claim, *parts[tier]] if parts[tier] else []
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [path, *drawn]


def record_lines(
    record: Record, pairs: Sequence[Pair], left_out: Sequence[str], found: Sequence[Comparison]
) -> Iterator[str]:
    """Yields the lines of a record, from its title to its table."""
    yield from ("", f"### {record.claim}", "")
    yield from (f"- **{name}** {text}" for name, text in _facts(record, pairs))
    yield from (f"- **Note** {note}" for note in record.notes)
    yield from (f"- **Mind** {text}" for text in cautions(record, pairs))
    yield from (f"- **Left out** {text}" for text in left_out)
    yield from ("", "```bash", record.command, "```", "")
    yield f"| metric | {BASELINE} | {RL_KERNEL} | difference | {INTERVAL} | of each pair | verdict |"
    yield "| --- | ---: | ---: | ---: | --- | --- | --- |"
    for c in found:
        cells = [
            c.metric.label.replace("|", "\\|"),
            *(_value(c, c.sides[side]) for side in SIDES),
            *_judged(c),
        ]
        yield f"| {' | '.join(cells)} |"
    recorded = {c.metric.name for c in found}
    if absent := [metric_of(name).label for name in METRICS if name not in {*recorded, PASS_TIME}]:
        yield from ("", f"Recorded by neither side: {'; '.join(absent)}.")
    yield from percentile_lines(record, pairs, found)
    yield from evaluation_lines(pairs)


def _facts(record: Record, pairs: Sequence[Pair]) -> Iterator[tuple[str, str]]:
    """Yields the facts for readers: switch, rollouts, counts, order, machine and versions."""
    switch, first = record.switch, pairs[0][0]
    preset = "" if record.preset is None else f", preset {record.preset}"
    typed = {side: ",".join(map(str, v)) if isinstance(v := switch.of(side), list) else v for side in SIDES}
    sides = ", ".join(f"`{value}` in {side}" for side, value in typed.items())
    yield "Benchmark", f"{record.name}{preset}; `{switch.field}` is {sides}"
    flags = config_flags(first.config)
    if flags.get("prompt_data"):
        values = flags["prompt_data"]
        paths = [values] if isinstance(values, str) else values
        file = " ".join("/".join(Path(path).parts[-3:]) for path in paths)
        yield (
            "Rollouts",
            f"{flags['rollout_batch_size']} prompts x {flags['n_samples_per_prompt']} answers of at most "
            f"{flags['rollout_max_response_len']} tokens, prompts of `{file}`, reward "
            f"`{flags.get('custom_rm_path') or flags.get('rm_type')}`",
        )
    steps = len(first.steps) - record.warm_up  # all runs are finished and have one length
    yield "Counted", f"pairs: {len(pairs)}; steps of each run: {steps} after {record.warm_up} of warm-up"
    baselines = {id(repeat) for repeat, _ in pairs}
    order = " ".join(BASELINE[0] if id(repeat) in baselines else RL_KERNEL[0] for repeat in in_order(pairs))
    starts = [[datetime.fromisoformat(each.environment["time"]) for each in pair] for pair in pairs]
    minutes = max(abs(b - a).total_seconds() / 60 for a, b in starts)
    yield "Order", f"{order}; the runs of a pair started up to {number(minutes, digits=2)} min apart"
    yield "Hardware", used_hardware(first.environment, first.config)
    told = dict(flatten(first.environment))
    versions = {name: told.get(f"packages.{name}") for name in PACKAGES}
    known = {"Python": told.get("python.version"), **versions}
    yield (
        "Versions",
        ", ".join(f"{name} {version}" for name, version in known.items() if version) or "unknown",
    )
    yield "Commit", str(told.get("git.commit") or "unknown")


def used_hardware(environment: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns the hardware that a run used. The host may have more GPUs, also for a run on a CPU."""
    flags = config_flags(config)
    if flags["device"] == "cpu":
        cpu = environment["cpu"]
        return f"CPU, {cpu['usable_cores']} of {cpu['cores']} cores of {cpu['model']}"
    trainers = flags["actor_num_nodes"] * flags["actor_num_gpus_per_node"]
    engines = flags["rollout_num_gpus"] or 0
    used = max(trainers, engines) if flags["colocate"] else trainers + engines
    gpus = environment["gpus"]
    kinds = dict.fromkeys(f"{gpu['name']}, {gpu['memory_mib']} MiB, driver {gpu['driver']}" for gpu in gpus)
    if used > len(gpus):
        return f"{used} x {'; '.join(kinds)} (looked at on one host, which has {len(gpus)})"
    return f"{used}{f' of {len(gpus)}' if used < len(gpus) else ''} x {'; '.join(kinds)}"


def _judged(c: Comparison) -> list[str]:
    """Returns the cells difference, interval, pairs and verdict (bold if a difference is shown)."""
    d, metric = c.difference, c.metric
    if d is None:
        whole = WHOLE_OF.get(metric.name)
        why = f"see {metric_of(whole).label}" if whole else "no step in which both sides recorded it"
        return ["none", "none", "none", f"{c.missing[0]} did not record it" if c.missing else why]
    interval = "none"
    if d.low is not None and d.high is not None:
        interval = f"{bare(d, d.low, '+')} to {amount(metric, d, d.high, '+')}"
    words, differs = verdict(metric, d)
    words = f"**{words}**" if differs else words
    return [amount(metric, d, d.value, "+"), interval, _pairs(c, d), words]


def _pairs(c: Comparison, d: Difference) -> str:
    if len(d.pairs) > MOST_PAIRS:
        low, high = bare(d, min(d.pairs), "+"), amount(c.metric, d, max(d.pairs), "+")
        return f"{low} to {high} ({len(d.pairs)} pairs)"
    *others, last = d.pairs
    return ", ".join([*(bare(d, x, "+") for x in others), amount(c.metric, d, last, "+")])


def _value(c: Comparison, summary: Summary | None) -> str:
    """Returns mean and spread, and the number of recorded steps if some steps lack the metric."""
    if summary is None:
        return "not recorded"
    spread = "" if summary.spread is None else f" ± {number(summary.spread, digits=2)}"
    steps = "" if summary.steps == c.steps else f" (in {summary.steps} of {c.steps} steps)"
    return with_unit(number(summary.mean) + spread, c.metric) + steps


def in_full(record: Record, pairs: Sequence[Pair]) -> Iterator[str]:
    """Yields configuration and environment of the first baseline. The other runs are equal except for paths."""
    repeat, excepted = pairs[0][0], ", ".join(EXCEPTED)
    yield from folded(
        f"Resolved configuration of {repeat.run} (equal in all runs, but for {record.switch.field}, the seeds "
        f"of a pair and where a run writes: {excepted})",
        repeat.config,
    )
    yield from folded(f"Environment of {repeat.run}", repeat.environment)


def folded(title: str, values: Mapping[str, object]) -> Iterator[str]:
    yield from ("", "<details>", f"<summary>{title}</summary>", "", "```text")
    yield from (f"{path}: {json.dumps(value)}" for path, value in flatten(mask_secrets(values)))
    yield from ("```", "", "</details>")
