"""operators.json as a section of a report: each operator of rl_kernel beside each contender. Owns its Markdown.

One table a case: the ratio of the two times with its interval, the memory of both, a verdict. What failed, is not
installed or ran no kernel is named with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.bench.operator_pictures import case_picture
from vime.bench.operators import Case, Match, all_rows, cases_of, ran_kernel, short_name
from vime.bench.record import RL_KERNEL
from vime.bench.statistics import LEVEL, sign_rank
from vime.bench.verdicts import number
from vime.bench.where import facts, folded
from vime.plot import save

INTERVAL = f"{100 * LEVEL:.0f} % interval"
HEAD = (RL_KERNEL, "beside", f"{RL_KERNEL}, ms", "ms", "ratio", INTERVAL, "extra MiB of both", "verdict")
NO_GPU = "No GPU: these times show that the benchmark works, and nothing of a GPU."


def operator_lines(content: Mapping[str, Any], out: Path, prefix: str, written: list[Path]) -> Iterator[str]:
    """The part of the report of one file; pictures go to `out`, and their paths to `written`."""
    machine, cases = content["machine"], cases_of(content)
    yield from ("", f"### rl_kernel.bench: {RL_KERNEL} beside other implementations", "")
    yield from (f"- **{name}** {text}" for name, text in facts(machine))
    yield from ("", "```bash", machine["command"], "```", "")
    yield from how_to_read(cases)
    if machine.get("gpu") is None:
        yield from ("", NO_GPU)
    for case in cases:
        if case.name == "bytes":
            continue
        yield from ("", f"#### {case.name}: {case.shape}", "")
        yield from case_lines(case)
        yield from _drawn(case, out, prefix, written)
    if content["elementwise"]:
        yield from ("", "#### Operators that move bytes", "")
        yield from stream_lines(content["elementwise"])
        for case in (case for case in cases if case.name == "bytes" and case.matches):
            yield ""
            yield from case_lines(case)
            yield from _drawn(case, out, prefix, written)
    yield from ("", "#### Fallbacks", "")
    yield from fallback_lines(content)
    yield from folded("Environment", machine)


def _drawn(case: Case, out: Path, prefix: str, written: list[Path]) -> Iterator[str]:
    if case.matches:
        path = save(case_picture(case), out / f"{prefix}-{case.name}.png")
        written.append(path)
        yield from ("", f"![{case.name}: time of a call]({path.name})")


def how_to_read(cases: Sequence[Case]) -> Iterator[str]:
    """What ratio and interval are; said of old files, too, that they have none."""
    rounds = sorted({match.ratio.steps for case in cases for match in case.matches if match.ratio})
    yield (
        f"**Ratio** is the time of {RL_KERNEL} by that of the other: below 1 {RL_KERNEL} is faster. Both took turns in "
        "one process; it is the median over the rounds, each time call k by call k. The "
        f"{INTERVAL} is the sign test's for rounds that do not depend on each other, and holds for this process: "
        "another start may find other memory and clocks, and a slow drift makes it too narrow. A difference is shown "
        f"when it does not hold 1; of 20 equal pairs one is called different by chance. {RL_KERNEL} has the workspace "
        "that a run has by default, where "
        "it was measured. `main_grad` in a row: it adds its weight gradient to a float32 buffer, as a run does; all "
        "others write bfloat16. **Extra MiB** is the peak of a call beyond inputs and gradients: who is slower may "
        "need less."
    )
    if rounds:
        few = [each for each in rounds if sign_rank(each) is None]
        yield ""
        yield f"Rounds: {rounds[0]} to {rounds[-1]}." if len(rounds) > 1 else f"Rounds: {rounds[0]}."
        if few:
            yield "Of fewer than 6 there is no interval and no verdict."
    if any(match.ratio is None for case in cases for match in case.matches):
        yield ""
        yield (
            "This file keeps the median, least and largest of the calls and not the calls, so that there is **no "
            "interval**, and the ratio is that of the medians. A verdict is given where both made 6 calls or more and "
            "all calls of one took less than all calls of the other."
        )


def case_lines(case: Case) -> Iterator[str]:
    """The table of a case, then what stands beside nothing, with the reason."""
    if case.matches:
        yield f"| {' | '.join(HEAD)} |"
        yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"
        yield from (f"| {' | '.join(_cells(match))} |" for match in case.matches)
    else:
        yield "Nothing to compare: no contender was measured beside rl_kernel."
    if case.unmatched:
        yield ""
    yield from (f"- {name}: not compared, as {why}" for name, why in case.unmatched)


def _cells(match: Match) -> list[str]:
    ratio = match.ratio
    shown = ratio is not None and ratio.low is not None and ratio.high is not None
    return [
        match.ours["name"],
        short_name(match.rival),
        times(match.ours),
        times(match.rival),
        f"{match.value:.3f}",
        f"{1 + ratio.low:.3f} to {1 + ratio.high:.3f}" if shown else "none",
        f"{memory(match.ours)}, {memory(match.rival)}",
        bold(match.words),
    ]


def bold(words: str) -> str:
    return f"**{words}**" if words in ("faster", "slower") else words


def times(row: Mapping[str, Any]) -> str:
    ms = row["ms"]
    return f"{number(ms['median'])} ({number(ms['min'])} to {number(ms['max'])})"


def memory(row: Mapping[str, Any]) -> str:
    return f"{row['extra_mib']:,.0f}" if "extra_mib" in row else "not measured"


def stream_lines(streams: Mapping[str, Any]) -> Iterator[str]:
    """rl_kernel's rows against a copy on the same device: the bytes that any implementation has to move."""
    yield f"Held against a device copy, {streams['copy_gbs']:,} GB/s: the fewest bytes an implementation has to move."
    head = "row", "ms", "GB/s", "of a copy", "target", "extra MiB"
    yield from ("", f"| {' | '.join(head)} |", "| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in (row for row in streams["rows"] if row["operator"] != "rival"):
        if "ms" not in row:
            yield f"| {row['name']} | {row['skipped']} | | | | |"
            continue
        target = "none"
        if "target" in row:
            target = f"{row['target']['limit']:g}, {'met' if row['met'] else '**missed**'}"
        cells = [times(row), f"{row['gbs']:,.0f}", f"{row['share']:.2f}", target, memory(row)]
        yield f"| {row['name']} | {' | '.join(cells)} |"


def fallback_lines(content: Mapping[str, Any]) -> Iterator[str]:
    """Rows of rl_kernel that ran no kernel, by reason."""
    reasons: dict[str, list[str]] = {}
    for row in all_rows(content):
        if row["operator"] == "rival" or "ms" not in row or ran_kernel(row):
            continue
        for reason in row.get("fallbacks") or ["by design on host tensors"]:
            reasons.setdefault(reason, []).append(row["name"])
    if not reasons:
        yield "No row of rl_kernel ran the reference instead of a kernel."
    for reason, names in reasons.items():
        yield f"- ran the PyTorch reference ({reason}), so there is no verdict: {', '.join(dict.fromkeys(names))}"
