"""rl_kernel.bench's results as a part of docs/benchmarks.md: a matrix of ratios, and every target that is missed.

The page of a report (vime.bench.operator_tables) has a table a case; here cases are columns, so that a reader sees
where an operator wins and where it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_kernel.benchmarks.report import judged
from vime.bench.operator_tables import NO_GPU, case_lines, fallback_lines, how_to_read, stream_lines
from vime.bench.operators import Case, Match, all_rows, cases_of, short_name
from vime.bench.published_tables import told
from vime.bench.verdicts import number

Content = Mapping[str, Any]
HEADLINE = "linear_token_loss 1.5GiB bf16 main_grad"
"""What a run calls by default, its weight gradient into the trainer's buffer."""
LARGE_TOKENS = 4096
RIVALS = ("native", "torch compile", "liger grpo")
"""What a trainer would call instead, and the fastest public one."""


def in_short(contents: Sequence[Content]) -> Iterator[str]:
    """What is fast, what is slower than others and what is missed in these files, a line each."""
    cases = [case for content in contents for case in cases_of(content)]
    tokens = {c["case"]["name"]: c["case"]["tokens"] for content in contents for c in content["linear"]}
    ours = [(c.name, match) for c in cases for match in c.matches if match.ours["name"] == HEADLINE]
    large = [(name, match) for name, match in ours if tokens[name] >= LARGE_TOKENS]
    beside = {rival: [pair for pair in large if pair[1].rival["name"] == rival] for rival in RIVALS}
    if any(beside.values()):
        told_of = "; ".join(f"{rival}: {_shares(found)}" for rival, found in beside.items() if found)
        small = [match.ours["ratio"] for name, match in ours if tokens[name] < LARGE_TOKENS]
        below = f", below {LARGE_TOKENS:,} tokens {_range(small)}" if small else ""
        floor = _range([match.ours["ratio"] for _, match in large])
        yield (
            f"- **LM head and loss** (`{HEADLINE}`, forward and backward, from {LARGE_TOKENS:,} tokens on; "
            f"cases [below](#operators)) beside {told_of}. It takes {floor} of the time of the bare matrix "
            f"products{below}"
        )
    moving = [row["share"] for content in contents for row in _streams(content) if "met" in row]
    if moving:
        yield (
            f"- **Operators that move bytes** reach {_range(moving)} of a copy's bandwidth, in all {len(moving)} rows "
            "with a target"
        )
    rivals: dict[str, list[Match]] = {}
    for match in (match for case in cases for match in case.matches):
        rivals.setdefault(short_name(match.rival), []).append(match)
    slower = {rival: [m.value for m in found if m.words == "slower"] for rival, found in rivals.items()}
    if any(slower.values()):
        lost = ", ".join(
            f"{rival} in {len(values)} of {len(rivals[rival])} (up to {max(values):.2f} of its time)"
            for rival, values in slower.items()
            if values
        )
        yield f"- **Slower** than {lost} comparisons [below](#operators)"
    held = [each for content in contents for each in _measured_targets(content)]
    missed = sum(not met for _, _, met, _ in held)
    if held:
        named = ", each named [below](#operators)" if missed else ""
        yield f"- **Targets of operators** {len(held) - missed} met, **{missed} missed**{named}"


def _streams(content: Content) -> list[dict[str, Any]]:
    """rl_kernel's rows of the operators that move bytes."""
    rows = (content["elementwise"] or {"rows": []})["rows"]
    return [row for row in rows if row["operator"] != "rival"]


def _shares(pairs: Sequence[tuple[str, Match]]) -> str:
    """Of the time and of the memory of a contender, over cases by name; a difference that is not shown is said so."""
    memory = [m.ours["extra_mib"] / m.rival["extra_mib"] for _, m in pairs if m.rival.get("extra_mib")]
    unshown = [name for name, match in pairs if match.words not in ("faster", "slower")]
    text = f"{_range([match.value for _, match in pairs])} of the time"
    if unshown:
        where = "" if len(unshown) == len(pairs) else f" in {', '.join(unshown)}"
        text += f" (no difference shown{where})"
    return text + (f", {_range(memory)} of the memory" if memory else "")


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def pictured(content: Content) -> Case | None:
    """The case whose bars the page shows: the one with the largest logits."""
    largest = max(content["linear"], key=lambda c: c["case"]["tokens"] * c["case"]["vocab"], default=None)
    cases = [case for case in cases_of(content) if case.matches]
    return next((c for c in cases if largest and c.name == largest["case"]["name"]), None)


def operator_page(content: Content, picture: str | None) -> Iterator[str]:
    """The cases before what was measured of them; `picture`: the link to the bars of one."""
    yield from told({"what": "Operators of rl_kernel, each call timed in turns with the others", **content})
    cases = cases_of(content)
    linear = [case for case in cases if case.floor_ms is not None]
    if content["machine"].get("gpu") is None:
        yield from ("", NO_GPU)
    if linear:
        yield from ("", "#### Cases")
        yield from _shapes(content)
        yield from ("", "#### Operators of these cases")
    if any(case.matches for case in cases):
        yield ""
        yield from how_to_read(cases)
        yield ""
        yield (
            "Cells: the ratio, bold where a difference is shown, with its interval where there is one and the number "
            "of calls where they are too few for a verdict; below it the extra memory of both in GiB. What the rows "
            "are: [benchmarks/README.md](../benchmarks/README.md#rows)."
        )
    for form in dict.fromkeys(_form(match) for case in linear for match in case.matches):
        yield from _matrix(form, linear)
    if picture is not None:
        yield from ("", picture)
    reasons: dict[str, list[str]] = {}
    for case in linear:
        for name, why in case.unmatched:
            reasons.setdefault(f"{name}: not compared, as {why}", []).append(case.name)
    if reasons:
        yield ""
    yield from (f"- {what} ({', '.join(where)})" for what, where in reasons.items())
    if content["elementwise"] and content["elementwise"]["rows"]:
        yield from ("", "#### Operators that move bytes", "")
        yield from stream_lines(content["elementwise"])
        for case in (case for case in cases if case.floor_ms is None and case.matches):
            yield ""
            yield from case_lines(case)
    if any(row.get("fallbacks") for row in all_rows(content)):
        yield ""
        yield from fallback_lines(content)


def _form(match: Match) -> str:
    """The operator, and where its weight gradient goes: what its rows share, whatever they do with the entropy."""
    where = " into main_grad" if match.ours["main_grad"] else ""
    return f"{match.operator}{where}"


def _matrix(form: str, cases: Sequence[Case]) -> Iterator[str]:
    columns = [(case, {m.rival["name"]: m for m in case.matches if _form(m) == form}) for case in cases]
    columns = [(case, found) for case, found in columns if found]
    yield from ("", f"| `{form}` beside | {' | '.join(case.name for case, _ in columns)} |")
    yield "| --- |" + " ---: |" * len(columns)
    for rival in dict.fromkeys(name for _, found in columns for name in found):
        cells = [_cell(found[rival]) if rival in found else "not compared" for _, found in columns]
        yield f"| {rival} | {' | '.join(cells)} |"


def _cell(match: Match) -> str:
    ratio = match.ratio
    text = f"**{match.value:.2f}**" if match.words in ("faster", "slower") else f"{match.value:.2f}"
    if match.too_few:
        text += f" ({match.rounds} calls)"
    if ratio is not None and ratio.low is not None and ratio.high is not None:
        text += f" [{1 + ratio.low:.2f}, {1 + ratio.high:.2f}]"
    if "extra_mib" in match.ours and "extra_mib" in match.rival:
        text += f"<br>{match.ours['extra_mib'] / 1024:.1f} / {match.rival['extra_mib'] / 1024:.1f}"
    return text


def _shapes(content: Content) -> Iterator[str]:
    yield from ("", f"| case | tokens | hidden | vocabulary | bare products, ms | `{HEADLINE}`, ms |")
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for result in content["linear"]:
        case = result["case"]
        row = next((r for r in result["rows"] if r["name"] == HEADLINE and "ms" in r), None)
        shape = " | ".join(f"{case[key]:,}" for key in ("tokens", "hidden", "vocab"))
        ms = "not measured" if row is None else f"{number(row['ms']['median'])} ({row['ratio']:.3f} of them)"
        yield f"| {case['name']} | {shape} | {number(result['floor_ms'])} | {ms} |"


def _measured_targets(content: Content) -> list[tuple[str, str, bool | None, str]]:
    """Every target that was measured."""
    return [each for each in judged(dict(content)) if each[2] is not None]


def missed_targets(content: Content) -> Iterator[str]:
    """Every target that is missed, a line a case."""
    held = _measured_targets(content)
    if not held:
        return
    short = [each for each in held if not each[2]]
    yield from ("", f"#### Targets: {len(held) - len(short)} met, {len(short)} missed")
    yield ""
    for place in dict.fromkeys(place for place, *_ in short):
        yield f"- **{place}**: " + "; ".join(f"{name} {text}" for at, name, _, text in short if at == place)
