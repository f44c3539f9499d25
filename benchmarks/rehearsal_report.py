"""Writes the page of the rehearsals' record: benchmarks/reports/rehearsals_cpu.md.

    python benchmarks/rehearsal_report.py [--merge RECORD ...]

With --merge, the record gets the rows of other records, for example of an earlier commit. The last row counts.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from rehearsals import RECORD, ROOT, SCRIPTS, read_rows, script_family, script_of, write_rows

PAGE = ROOT / "benchmarks/reports/rehearsals_cpu.md"
MOST = 160
"""Most characters of a problem in the table."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page of the rehearsals' record.")
    parser.add_argument("--merge", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    rows = read_rows()
    for path in args.merge:
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, row in found["scripts"].items():
            first = {"commit": row.get("commit") or found["commit"], "family": script_family(SCRIPTS[name])}
            rows[name] = {**first, **row}
    write_rows(rows)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(format_page(record), encoding="utf-8")
    print("\n".join(list_families(record["scripts"])))


def format_page(record: dict[str, Any]) -> str:
    rows, measured = record["scripts"], record["measured"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows.values()))
    done, of = measured["rehearsed"], measured["of"]
    seconds = ", ".join(f"{value:.0f}" for value in measured["seconds_min_median_max"])
    text = [
        "`vime rehearse` on the flags of slime's launch scripts, with made model folders and rows "
        "([rehearsals](../../docs/rehearse.md)).",
        f"- **Hardware** {record['hardware']}",
        f"- **Commits** {commits}; each row of the record names its own",
        f"- **Rehearsed** {done['scripts']} of {of['scripts']} scripts, {done['launches']} of {of['launches']} "
        "launches: three rollouts trained, all processes killed after the second one, and resumed",
        f"- **Without any problem** {measured['without_problem']} launches",
        f"- **Seconds** min, median, max of the rehearsed launches: {seconds}",
        "A launch that ran to its end is rehearsed, even if the plan refuses its layout on the cluster. "
        "A launch whose flags vime refuses is not rehearsed: the page has the refusal.",
    ]
    wrapped = [textwrap.fill(line, 118, subsequent_indent="  " * line.startswith("-")) for line in text]
    return "\n".join(
        [
            *("# rehearsals_cpu", "", wrapped[0], "", *wrapped[1:-1], "", wrapped[-1], ""),
            *(*list_families(rows), ""),
            "| launch | rehearsed | seconds | first problem of its page |",
            "| --- | --- | ---: | --- |",
            *(format_row(name, row) for name, row in rows.items()),
            *("", "```bash", record["command"], "```", ""),
            "File: [results/rehearsals_cpu.json](../results/rehearsals_cpu.json)\n",
        ]
    )


def format_row(name: str, row: dict[str, Any]) -> str:
    text = " ".join(row["problems"]).replace("|", "/").replace("<", "&lt;")
    if len(text) > MOST:
        text = text[:MOST].rsplit(" ", 1)[0] + " ..."
    return f"| {name} | {'yes' if row['rehearsed'] else '**no**'} | {row['seconds']:.0f} | {text or 'none'} |"


def list_families(rows: dict[str, Any]) -> Iterable[str]:
    """Yields a table with one line per family."""
    of_family: dict[str, list[str]] = defaultdict(list)
    for name in SCRIPTS:
        of_family[script_family(SCRIPTS[name]) or "no model"].append(name)
    yield "| family | launches rehearsed | scripts rehearsed | seconds: min, median, max |"
    yield "| --- | ---: | ---: | ---: |"
    for family, names in sorted(of_family.items()):
        done = [name for name in names if name in rows and rows[name]["rehearsed"]]
        seconds = [rows[name]["seconds"] for name in done]
        shown = (
            ", ".join(f"{value:.0f}" for value in (min(seconds), median(seconds), max(seconds)))
            if done
            else ""
        )
        scripts = [len({script_of(name) for name in some}) for some in (done, names)]
        yield f"| {family} | {len(done)} of {len(names)} | {scripts[0]} of {scripts[1]} | {shown} |"


if __name__ == "__main__":
    main()
