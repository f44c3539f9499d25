"""rl_kernel.bench's results as a part of docs/benchmarks.md: a matrix of ratios, and every target that is missed.

The page of a report (vime.bench.operator_tables) has a table a case; here cases are columns, so that a reader sees
where an operator wins and where it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    ours = [
        match
        for content in contents
        for case in _large(content)
        for match in case.matches
        if match.ours["name"] == HEADLINE
    ]
    beside = {rival: [match for match in ours if match.rival["name"] == rival] for rival in RIVALS}
    if any(beside.values()):
        floors = _range([match.ours["ratio"] for match in ours])
        told_of = "; ".join(f"{_shares(found)} of {rival}" for rival, found in beside.items() if found)
        yield (
            f"- **Fast** `{HEADLINE}` (LM head, log-probs, loss, backward; from {LARGE_TOKENS:,} tokens on) takes "
            f"{floors} of the time of the bare matrix products; {told_of}"
        )
    moving = [row for content in contents for row in _streams(content) if "met" in row]
    if moving:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(row["operator"] for row in moving))
        yield f"- **Bandwidth** {_range([row['share'] for row in moving])} of a copy's in all rows of {names}"
    slower: dict[str, list[str]] = {}
    for content in contents:
        for case in cases_of(content):
            for match in (match for match in case.matches if match.words == "slower"):
                what = f"`{match.ours['name']}` {match.value:.2f} ({case.name})"
                slower.setdefault(short_name(match.rival), []).append(what)
    if slower:
        lost = "; ".join(f"to {rival}: {', '.join(what)}" for rival, what in slower.items())
        yield f"- **Slower than others**, ratio of the times {lost}"
    judged = [each for content in contents for each in _judged(content)]
    short = [place for place, _, met, _ in judged if not met]
    if judged:
        counts = ", ".join(f"{place} {short.count(place)}" for place in dict.fromkeys(short))
        named = f" ({counts}), all named [below](#operators)" if short else ""
        yield f"- **Targets of operators** {len(judged) - len(short)} met, **{len(short)} missed**{named}"


def _large(content: Content) -> list[Case]:
    names = {c["case"]["name"] for c in content["linear"] if c["case"]["tokens"] >= LARGE_TOKENS}
    return [case for case in cases_of(content) if case.name in names]


def _streams(content: Content) -> list[dict[str, Any]]:
    """rl_kernel's rows of the operators that move bytes."""
    rows = (content["elementwise"] or {"rows": []})["rows"]
    return [row for row in rows if row["operator"] != "rival"]


def _shares(matches: Sequence[Match]) -> str:
    """Of the time and of the memory of a contender, over cases."""
    memory = [m.ours["extra_mib"] / m.rival["extra_mib"] for m in matches if m.rival.get("extra_mib")]
    return f"{_range([match.value for match in matches])} of the time" + (
        f" and {_range(memory)} of the memory" if memory else ""
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def pictured(content: Content) -> Case | None:
    """The case whose bars the page shows: the one with the largest logits."""
    largest = max(content["linear"], key=lambda c: c["case"]["tokens"] * c["case"]["vocab"], default=None)
    cases = [case for case in cases_of(content) if case.matches]
    return next((c for c in cases if largest and c.name == largest["case"]["name"]), None)


def operator_page(content: Content) -> Iterator[str]:
    yield from told({"what": "Operators of rl_kernel, each call timed in turns with the others", **content})
    cases = cases_of(content)
    linear = [case for case in cases if case.floor_ms is not None]
    if content["machine"].get("gpu") is None:
        yield from ("", NO_GPU)
    if any(case.matches for case in cases):
        yield ""
        yield from how_to_read(cases)
        yield ""
        yield (
            "Cells: the ratio, bold where a difference is shown, with its interval where there is one; below it the "
            "extra memory of both in GiB."
        )
    for form in dict.fromkeys(_form(match) for case in linear for match in case.matches):
        yield from _matrix(form, linear)
    if linear:
        yield from _shapes(content)
    reasons: dict[str, list[str]] = {}
    for case in linear:
        for name, why in case.unmatched:
            reasons.setdefault(f"{name}: not compared, as {why}", []).append(case.name)
    if reasons:
        yield ""
    yield from (f"- {what} ({', '.join(where)})" for what, where in reasons.items())
    if content["elementwise"] and content["elementwise"]["rows"]:
        yield from ("", "**Operators that move bytes**", "")
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


def _judged(content: Content) -> Iterator[tuple[str, str, bool, str]]:
    """(case, row, met, measured against the limit) of every target that was measured."""
    for result in content["linear"]:
        place = result["case"]["name"]
        for row in result["rows"]:
            if "met" in row:
                target = row["target"]
                of = f" x {target['base']}" if target["base"] else ""
                memory = f" in {target['mib']:g} MiB" if target["mib"] else ""
                yield (
                    place,
                    row["name"],
                    row["met"],
                    f"{target['value']:.3f}{of or ' x products'}, at most {target['limit']:g}{memory}",
                )
        for pair in result["comparisons"]:
            if pair["ours"] is not None:
                what = f"{pair['ours']} beside {pair['rival']}"
                yield (
                    place,
                    what,
                    pair["met"],
                    f"{pair['speedup']:.2f} x as fast, at least {pair['target']:g}",
                )
    for row in _streams(content):
        if "met" in row:
            limit = f"{row['share']:.2f} of a copy, at least {row['target']['limit']:g}"
            yield "bytes", row["name"], row["met"], limit


def missed_targets(content: Content) -> Iterator[str]:
    """Every target that is missed, a line a case."""
    judged = list(_judged(content))
    if not judged:
        return
    short = [each for each in judged if not each[2]]
    yield from ("", f"**Targets: {len(judged) - len(short)} met, {len(short)} missed.**")
    yield ""
    for place in dict.fromkeys(place for place, *_ in short):
        yield f"- **{place}**: " + "; ".join(f"{name} {text}" for at, name, _, text in short if at == place)
