"""`vime compare RUN RUN`: compares two runs, or the seeds of two configurations. Prints Markdown.

The text lists the flags, versions and machines that differ, and compares the curves. With three pairs of seeds or more,
each difference has an interval (`vime.view.statistics`). `vime bench` compares one switch on one machine, and refuses
runs that differ in more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from vime.doctor.finding import one_line
from vime.view.compare_curves import curve_lines, score_lines
from vime.view.compare_runs import SEEDS, ComparedRun, differing, find_runs, pair_up
from vime.view.measures import EXCEPTED, RUN_FLAGS
from vime.view.statistics import LEVEL, MIN_PAIRS

_LONGEST = 80
_NOT_COMPARED = ("command", "directory", "time", "host.name")


def main(argv: Sequence[str]) -> None:
    """Prints the comparison. Raises ValueError for a path that is not a run."""
    args = _parser().parse_args(argv)
    print("\n".join(comparison(args.run, args.other)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime compare",
        description="How two runs differ: configuration, versions and curves, in Markdown.",
        epilog="A pattern in quotes names the seeds of one side: vime compare 'runs/a-*' 'runs/b-*'",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or a pattern in quotes")
    parser.add_argument("other", metavar="RUN", help="what it is compared with")
    return parser


def comparison(one: str, other: str) -> Iterator[str]:
    """Yields the lines of the Markdown text."""
    sides = (find_runs(one), find_runs(other))
    pairs, paired = pair_up(*sides)
    yield from (f"# A: {code(one)}, B: {code(other)}", "")
    yield from _runs(sides)
    yield from ("", "## Configuration", "", *_configuration(sides))
    yield from ("", "## Versions and machine", "", *_environment(sides))
    yield from ("", "## Curves", "")
    if len(pairs) < MIN_PAIRS:
        yield f"{paired} Intervals need {MIN_PAIRS} pairs; there {'is 1' if len(pairs) == 1 else f'are {len(pairs)}'}."
    else:
        yield (
            f"{paired} In brackets: the {100 * LEVEL:.0f} % interval of the difference over {len(pairs)} pairs "
            "(Student's). Bold: it leaves out 0, as one interval in twenty does by chance."
        )
    yield from curve_lines(pairs)
    yield from score_lines(pairs)


def _runs(sides: tuple[list[ComparedRun], list[ComparedRun]]) -> Iterator[str]:
    yield f"| side | run | state | rollouts | {' | '.join(SEEDS)} |"
    yield f"| --- | --- | --- | ---: |{' ---: |' * len(SEEDS)}"
    for side, runs in zip("AB", sides, strict=True):
        for run in runs:
            trained = "-" if run.summary is None or run.summary.rollout is None else run.summary.rollout + 1
            seeds = " | ".join("-" if seed is None else code(str(seed)).strip("`") for seed in run.seeds)
            yield f"| {side} | {code(run.name)} | {run.state} | {trained} | {seeds} |"
    for run in (run for runs in sides for run in runs):
        for name, count in run.damaged.items():
            yield from ("", f"{code(run.name)}: {count} damaged lines in {name} are left out.")


def _configuration(sides: tuple[list[ComparedRun], list[ComparedRun]]) -> list[str]:
    if any(not run.config for runs in sides for run in runs):
        return ["A run has no config.json, so flags are not compared."]
    found = differing(*([run.config for run in runs] for runs in sides))
    found = {path: values for path, values in found.items() if path.rpartition(".")[2] not in EXCEPTED}
    if not found:
        return ["No flag differs."]
    rows = {"--" + path.rpartition(".")[2].replace("_", "-"): values for path, values in found.items()}
    return list(_table("flag", rows))


def _environment(sides: tuple[list[ComparedRun], list[ComparedRun]]) -> list[str]:
    if any(not run.environment for runs in sides for run in runs):
        return ["A run has no environment.json, so versions are not compared."]
    found = differing(*([run.environment for run in runs] for runs in sides))
    rows = {
        path: values
        for path, values in found.items()
        if path not in (*RUN_FLAGS, *_NOT_COMPARED) and not path.startswith("command.")
    }
    return list(_table("what", rows)) if rows else ["No version and nothing of the machine differs."]


def _table(title: str, rows: dict[str, tuple[str, str]]) -> Iterator[str]:
    yield from (f"| {title} | A | B |", "| --- | --- | --- |")
    for name, values in rows.items():
        yield f"| {code(name)} | {' | '.join(map(code, values))} |"


def code(text: str) -> str:
    """Formats a run's text as Markdown code: unchanged, on one line, and cut to the width of a table."""
    line = one_line(text).replace("`", "'").replace("|", "\\|")
    return f"`{line if len(line) <= _LONGEST else line[: _LONGEST - 3] + '...'}`"
