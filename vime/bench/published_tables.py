"""One result file of benchmarks/results as Markdown: what was measured, the commands, where, and every number.

Owns how a file is read that has no schema: what it says of itself (what, command, commit, versions, note) stands beside
its numbers, and a part of a file is told like a file. Nothing is left out without saying so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vime.bench.record import METRICS
from vime.bench.verdicts import SMALL, number
from vime.bench.where import facts
from vime.run_metrics import TIME_METRICS

Content = Mapping[str, Any]

TOLD = (
    "what",
    "name",
    "date",
    "commit",
    "gpu",
    "device",
    "driver",
    "versions",
    "machine",
    "command",
    "commands",
)
NOTES = ("note", "result", "figures_note")
COLUMNS = {
    "perf/step_time": "step, s",
    "perf/rollout_time": "rollout, s",
    "perf/train_time": "training, s",
    "perf/update_weights_time": "weights, s",
    "perf/tokens_per_gpu_per_sec": "rollout, tokens/s/GPU",
    "perf/actor_train_tok_per_s": "training, tokens/s",
    "perf/trainer_peak_gib": "trainer's peak, GiB",
    "train/train_rollout_logprob_abs_diff": "log-prob difference, nats",
}
"""Of a step in a table; the others are in the file."""
UNITS = {"tokens_per_s": "tokens/s", "tflops": "TFLOP/s a GPU", "seconds": "s", "gb_per_s": "GB/s"}


def result_lines(content: Content, figures: Sequence[str] = ()) -> Iterator[str]:
    """What a file says of itself, its `figures` against targets, its numbers."""
    yield from told(content)
    if figures:
        yield ""
        yield from figures
    for key in NOTES:
        if key in content:
            yield from ("", f"{'Figures: ' if key == 'figures_note' else ''}{_escaped(content[key])}")
    yield from numbers(content)


def told(content: Content) -> Iterator[str]:
    """What was measured, where, with what, when; then the commands, word for word."""
    if "what" in content:
        yield f"{_escaped(content['what'])}."
        yield ""
    machine = content.get("machine", {})
    hardware, driver = content.get("gpu", content.get("device", machine.get("gpu"))), content.get("driver")
    driver = driver or machine.get("gpu_facts", {}).get("driver_version")
    whole = "date" in content or "machine" in content
    said = {
        "Hardware": hardware and ", ".join([hardware, *_driver(driver, whole)]),
        "Versions": _versions(content),
        "Commit": content.get("commit", machine.get("commit")),
        "Date": str(content.get("date", machine.get("date", "")))[:10],
    }
    inside = {"Commit": "commit", "Versions": "versions"}
    for name, text in said.items():
        if not text and whole:
            key = inside.get(name)
            text = "below, part by part" if key and _inside(content, key) else "not noted"
        if text:
            yield f"- **{name}** {text}"
    commands = [content["command"]] if "command" in content else content.get("commands", [])
    commands = [machine["command"]] if "command" in machine else commands
    if commands:
        yield from ("", "```bash", *commands, "```")


def _driver(driver: str | None, whole: bool) -> list[str]:
    return [f"driver {driver or 'not noted'}"] if driver or whole else []


def _versions(content: Content) -> str:
    versions = content.get("versions")
    if versions:
        return ", ".join(f"{name} {version}" for name, version in versions.items())
    if "machine" in content:
        found = dict(facts(content["machine"]))["Versions"]
        names = ("liger-kernel", "cut-cross-entropy")
        more = [f"{name} {content['machine'][name]}" for name in names if content["machine"].get(name)]
        return ", ".join([found, *more])
    return ""


def _inside(content: Any, key: str) -> bool:
    parts = content.values() if isinstance(content, Mapping) else content if isinstance(content, list) else ()
    return any((isinstance(part, Mapping) and key in part) or _inside(part, key) for part in parts)


def numbers(content: Content) -> Iterator[str]:
    """Every other key: medians and steps as tables, numbers as a line each, parts like files of their own."""
    rest = {key: value for key, value in content.items() if key not in (*TOLD, *NOTES, "figures")}
    plain = {key: value for key, value in rest.items() if _is_plain(value)}
    if plain:
        yield ""
    yield from (f"- {_label(key)}: {_shown(key, value)}" for key, value in plain.items())
    for key, value in rest.items():
        if key in plain:
            continue
        if key.startswith("medians"):
            yield from _medians(_label(key), value)
        elif isinstance(value, list) and value and _is_step(value[0]):
            yield from _steps(key, value)
        elif isinstance(value, Mapping) and all(
            isinstance(each, int | float | str) for each in value.values()
        ):
            yield ""
            yield f"- {_label(key)}: " + "; ".join(f"{k} {_shown(k, each)}" for k, each in value.items())
        else:
            parts = value.items() if isinstance(value, Mapping) and not _tells(value) else [(key, value)]
            for name, part in parts:
                several = part if isinstance(part, list) else [part]
                for i, each in enumerate(several, 1):
                    place = f" {i} of {len(several)}" if len(several) > 1 and "name" not in each else ""
                    yield from ("", f"#### {_label(each.get('name', name))}{place}", "")
                    yield from result_lines({**each, "name": ""})


def _tells(value: Content) -> bool:
    return any(key in value for key in (*TOLD, *NOTES))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, int | float) for each in value)
    return isinstance(value, int | float | str)


def _is_step(value: Any) -> bool:
    return isinstance(value, Mapping) and any(key in value for key in COLUMNS)


def _label(key: str) -> str:
    return key.replace("_", " ")


def _shown(key: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(number(each) for each in value) + (f" {UNITS[key]}" if key in UNITS else "")
    if isinstance(value, str):
        return _escaped(value)
    return f"{number(value)} {UNITS[key]}" if key in UNITS else number(value)


def _escaped(text: str) -> str:
    """Text of a file as a page shows it: underscores and stars of names are no emphasis."""
    return text.replace("*", "\\*").replace("_", "\\_").replace("|", "\\|")


def _medians(title: str, medians: Content) -> Iterator[str]:
    """The metrics of a benchmark, and the parts of a step from SMALL of the largest time on; the rest is counted."""
    known = {name: METRICS[name][:2] for name in METRICS if name in medians}
    least = SMALL * max((value for name, value in medians.items() if name.endswith("_time")), default=0.0)
    for name in TIME_METRICS:
        if name not in known and medians.get(name, 0.0) > least:
            known[name] = name.removeprefix("perf/").removesuffix("_time").replace("_", " "), "s"
    yield from ("", f"| {title} | |", "| --- | ---: |")
    yield from (f"| {label} | {number(medians[name])} {unit} |" for name, (label, unit) in known.items())
    if left := len(medians) - len(known):
        yield from ("", f"{left} more in the file.")


def _steps(title: str, steps: Sequence[Content]) -> Iterator[str]:
    columns = [name for name in COLUMNS if any(name in step for step in steps)]
    yield from ("", f"| {title.rstrip('s')} | {' | '.join(COLUMNS[name] for name in columns)} |")
    yield "| ---: |" + " ---: |" * len(columns)
    for i, step in enumerate(steps):
        cells = [number(step[name]) if name in step else "not recorded" for name in columns]
        yield f"| {step.get('step', step.get('rollout/step', i)):g} | {' | '.join(cells)} |"


def parallel_lines(content: Content, figures: Sequence[str] = ()) -> Iterator[str]:
    """Two GPUs with half of the vocabulary each, beside one GPU with half of it."""
    yield "The linear operators on two GPUs that hold half of the vocabulary each, beside one GPU with half of it."
    yield ""
    yield from told(content)
    yield from ("", "| case | row | one GPU, ms | two, ms | ratio | target | |")
    yield "| --- | --- | ---: | ---: | ---: | ---: | --- |"
    for row in content["rows"]:
        met = "met" if row["ratio"] <= content["limit"] else "**missed**"
        yield (
            f"| {row['case']} | {row['row']} | {number(row['one_ms'])} | {number(row['two_ms'])} | "
            f"{row['ratio']:.3f} | <= {content['limit']:g} | {met} |"
        )


def parallel_in_short(content: Content) -> Iterator[str]:
    ratios = [row["ratio"] for row in content["rows"]]
    short = sum(ratio > content["limit"] for ratio in ratios)
    yield (
        f"- **Two GPUs with half of the vocabulary each** {min(ratios):.2f} to {max(ratios):.2f} of the time of one "
        f"with half of it (at most {content['limit']:g}): {len(ratios) - short} met, **{short} missed**"
    )


def rollout_lines(content: Content, figures: Sequence[str] = ()) -> Iterator[str]:
    """One rollout beside bare clients of the same engine."""
    yield (
        f"{content['requests']} requests of {content['prompt_tokens']} + {content['response_tokens']} tokens at a time,"
        " one rollout beside bare clients of the same engine, in turns; medians, and every turn."
    )
    yield ""
    yield from told(content)
    yield from ("", *figures)
    yield from ("", "| client | tokens/s | rollout by it | turns, tokens/s |", "| --- | ---: | ---: | --- |")
    for name, speed in content["tokens_per_s"].items():
        share = number(content["ours_to"][name]) if name in content["ours_to"] else ""
        turns = ", ".join(number(turn["tokens_per_s"]) for turn in content["turns"][name])
        yield f"| {name} | {number(speed)} | {share} | {turns} |"
    yield from ("", _escaped(content.get("note", "")))
    yield from numbers(
        {key: part for key, part in content.items() if isinstance(part, Mapping) and _tells(part)}
    )


def audit_lines(content: Content, figures: Sequence[str] = ()) -> Iterator[str]:
    """Both sides of the switch, rollout by rollout: reward and how far trainer and engine differ; then the layouts of
    one rollout (`vime audit`)."""
    sides = content["rlk_fast"]
    yield from told(content)
    names = [
        ("reward", "reward"),
        ("abs_dlogp_mean", "mean difference, nats"),
        ("abs_dlogp_max", "largest, nats"),
    ]
    head = [f"{label}, `{side}`" for _, label in names for side in sides]
    yield from ("", f"| rollout | {' | '.join(head)} |", "| ---: |" + " ---: |" * len(head))
    for rows in zip(*sides.values(), strict=True):
        cells = [number(row[name]) for name, _ in names for row in rows]
        yield f"| {rows[0]['rollout_id']} | {' | '.join(cells)} |"
    means = {side: statistics.mean(row["abs_dlogp_mean"] for row in rows) for side, rows in sides.items()}
    yield ""
    yield (
        "Mean over the rollouts: "
        + ", ".join(f"`{side}` {number(mean)} nats" for side, mean in means.items())
        + "."
    )
    yield "One run a side, so this says nothing of a difference between the two."
    yield from ("", *figures)
    yield from ("", "| one | other | tokens | mean, nats | largest, nats | the same bits |")
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for pair in content["pairs"]:
        cells = (number(pair[key]) for key in ("tokens", "mean", "max", "bitwise_equal"))
        yield f"| {pair['first']} | {pair['second']} | {' | '.join(cells)} |"
    yield from ("", _escaped(content["note"]))
