"""May the runs of a record be compared? Configurations, environments, and which repeats make pairs.

Refuses (ValueError, every difference listed) runs that differ in anything but the switch, or ran on other hardware,
drivers, versions or code. What may differ is in EXCEPTED, PER_PAIR and OF_A_RUN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vime.bench.record import BASELINE, RL_KERNEL, SIDES, Record, Repeat, flags_of

EXCEPTED = ("run_dir", "weight_dir", "tb_experiment_name", "wandb_dir", "wandb_run_id", "notes")
"""Configuration: where a run writes, names and remarks. A value may differ; that there is one at all may not."""
PER_PAIR = ("seed", "rollout_seed")
"""Configuration: what one pair of repeats may have otherwise than the next, both of its runs alike."""
OF_A_RUN = (
    *("time", "command", "directory", "host.name"),
    *("variables.VIME_RL_KERNEL", "variables.VIME_RLK_FAST"),
)
"""Environment: what differs from run to run by itself, or is the switch, which the configuration says."""
KERNEL_SWITCHES = ("rlk_fast", "rl_kernel_ops")
MOST_LISTED = 20

Pair = tuple[Repeat, Repeat]
_ABSENT = "(absent)"


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of each leaf of nested dicts, and of lists that hold dicts."""
    if isinstance(value, Mapping) and (value or not prefix):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{i}")
    else:
        yield prefix, value


def refuse_unlike(record: Record, pairs: Sequence[Pair]) -> None:
    """ValueError, naming every difference, unless the runs of `pairs` (`pairs_of`) differ in the switch alone."""
    problems = [
        *_switch_problems(record, pairs),
        *_config_problems(record, pairs),
        *_environment_problems(pairs),
    ]
    if not problems:
        return
    listed = "; ".join(problems[:MOST_LISTED])
    more = f"; and {len(problems) - MOST_LISTED} more" if len(problems) > MOST_LISTED else ""
    raise ValueError(
        f"{record.name}: runs must differ in {record.switch['field']} alone to be compared, got {listed}{more}; "
        "give both sides one configuration, on one machine, of one version"
    )


def pairs_of(record: Record) -> tuple[list[Pair], list[str]]:
    """(pairs of finished repeats, repeat i of a side with i of the other; what was left out and why).

    ValueError when no pair is left.
    """
    pairs: list[Pair] = []
    left_out = []
    for pair in zip(record.sides[BASELINE], record.sides[RL_KERNEL], strict=True):
        reasons = [reason for repeat in pair if (reason := _unusable(repeat))]
        if reasons:
            left_out.append(f"{' and '.join(reasons)}: the pair {pair[0].run}, {pair[1].run} does not count")
        else:
            pairs.append(pair)
    if not pairs:
        raise ValueError(
            f"{record.name}: a comparison must have one pair of finished runs, got none: {'; '.join(left_out)}; "
            "measure again"
        )
    return pairs, left_out


def in_order(pairs: Sequence[Pair]) -> list[Repeat]:
    """The runs of `pairs` as they started."""
    return sorted((repeat for pair in pairs for repeat in pair), key=lambda repeat: repeat.order)


def cautions(record: Record, pairs: Sequence[Pair]) -> list[str]:
    """What does not forbid the comparison and yet has to be known to read it."""
    found = []
    runs = in_order(pairs)
    apart = [f"{a.run} and {b.run}" for a, b in pairs if abs(a.order - b.order) > 1]
    if apart:
        found.append(
            f"Other runs were between {', '.join(apart)}: what drifted over time is in their differences."
        )
    elif all(a.order < b.order for a, b in pairs):
        found.append(
            f"{BASELINE} ran first in every pair: a drift of 1 % from run to run adds one point to each difference."
        )
    hosts = {_leaf(repeat.environment, "host.name") for repeat in runs} - {None}
    if len(hosts) > 1:
        found.append(f"The runs are of several hosts of the same kind: {', '.join(sorted(hosts))}.")
    if any(_leaf(repeat.environment, "git.commit") is None for repeat in runs):
        found.append("Which commit was measured is not known for all runs.")
    if any(_leaf(repeat.environment, "git.modified") for repeat in runs):
        found.append("The checkout had changes that are in no commit.")
    return [*found, *_kernel_cautions(record, pairs)]


def _kernel_cautions(record: Record, pairs: Sequence[Pair]) -> list[str]:
    """Whether the side named for the kernels ran them."""
    found = []
    switch = record.switch
    if switch["field"] in KERNEL_SWITCHES and not kernels_ran(record, pairs):
        found.append(
            f"No kernel ran in {RL_KERNEL} that {BASELINE} did not run: nothing here is about kernels."
        )
    steps = [step for _, repeat in pairs for step in repeat.steps[record.warm_up :]]
    if switch["field"] == "rl_kernel_ops" and any(step.get("rl_kernel/fast") for step in steps):
        switched = set(switch[BASELINE]) ^ set(switch[RL_KERNEL])
        if idle := sorted(
            op for op in switched if not any(step.get(f"rl_kernel/{op}/calls") for step in steps)
        ):
            found.append(f"Switched and never called: {', '.join(idle)}.")
    calls: dict[str, int] = {}
    for _, repeat in pairs:
        for operator, count in repeat.fallbacks.items():
            calls[operator] = calls.get(operator, 0) + count
    if fell := [f"{operator} ({count:,} calls)" for operator, count in sorted(calls.items()) if count]:
        found.append(f"Part of {RL_KERNEL} ran no kernel: {', '.join(fell)} fell back.")
    return found


def kernels_ran(record: Record, pairs: Sequence[Pair]) -> bool:
    """Whether the side named for the kernels ran one that the switch turns on there. Of `rl_kernel_ops` those are its
    operators that the baseline does not have; one that fell back in every call ran none."""
    steps = [step for _, repeat in pairs for step in repeat.steps[record.warm_up :]]
    if not any(step.get("rl_kernel/fast") for step in steps):
        return False
    if record.switch["field"] != "rl_kernel_ops":
        return True
    switched = set(record.switch[RL_KERNEL]) - set(record.switch[BASELINE])
    return any(
        step.get(f"rl_kernel/{op}/calls", 0) > step.get(f"rl_kernel/{op}/fallbacks", 0)
        for step in steps
        for op in switched
    )


def _unusable(repeat: Repeat) -> str | None:
    if not repeat.finished:
        return f"{repeat.run} did not finish ({len(repeat.steps)} steps)"
    on_gpus = flags_of(repeat.config).get("device") == "cuda"
    if on_gpus and repeat.environment and not repeat.environment.get("gpus"):
        return f"{repeat.run} does not say on which GPUs it ran (nvidia-smi did not answer)"
    return None


def _switch_problems(record: Record, pairs: Sequence[Pair]) -> list[str]:
    field = record.switch["field"]
    if record.switch[BASELINE] == record.switch[RL_KERNEL]:
        return [f"{field}: {record.switch[BASELINE]!r} on both sides"]
    if not any(repeat.config for pair in pairs for repeat in pair):
        return ["no configuration at all"]
    found = []
    for side, repeat in ((side, repeat) for pair in pairs for side, repeat in zip(SIDES, pair, strict=True)):
        value = flags_of(repeat.config).get(field, _ABSENT)
        if value != record.switch[side]:
            told = value if value is _ABSENT else repr(value)
            found.append(f"{field}: {told} in {repeat.run}, {record.switch[side]!r} is the switch's")
    return found


def _config_problems(record: Record, pairs: Sequence[Pair]) -> list[str]:
    """Each run against the first of all; what only a pair must share, against its partner."""
    reference, field = pairs[0][0], record.switch["field"]
    first = _comparable_config(reference.config)
    found = []
    for repeat in in_order(pairs):
        own = _comparable_config(repeat.config)
        for path in _unequal(first, own):
            if not _is(path, field) and path.rpartition(".")[2] not in PER_PAIR:
                found.append(_told(path, first, reference, own, repeat))
    for one, other in pairs:
        a, b = _comparable_config(one.config), _comparable_config(other.config)
        unequal = [path for path in _unequal(a, b) if path.rpartition(".")[2] in PER_PAIR]
        found += [_told(path, a, one, b, other) for path in unequal]
    return found


def _environment_problems(pairs: Sequence[Pair]) -> list[str]:
    repeats = in_order(pairs)
    unknown = [repeat.run for repeat in repeats if not repeat.environment]
    if unknown:
        return [f"no environment (hardware, versions) of {', '.join(unknown)}"]
    leaves = [dict(flatten(repeat.environment)) for repeat in repeats]
    return [
        _told(path, leaves[0], repeats[0], own, repeat)
        for repeat, own in zip(repeats[1:], leaves[1:], strict=True)
        for path in _unequal(leaves[0], own)
        if path not in OF_A_RUN
    ]


def _comparable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves, with directories of the run itself by what they are."""
    leaves = dict(flatten(config))
    run_dir: str = flags_of(config).get("run_dir") or ""

    def told(path: str, value: Any) -> Any:
        name = path.rpartition(".")[2]
        if name in EXCEPTED:
            return value if value is None else f"<{name}>"
        inside = isinstance(value, str) and run_dir and (value == run_dir or value.startswith(f"{run_dir}/"))
        return "<run_dir>" + value[len(run_dir) :] if inside else value

    return {path: told(path, value) for path, value in leaves.items()}


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [path for path in {**one, **other} if one.get(path, _ABSENT) != other.get(path, _ABSENT)]


def _told(path: str, one: Mapping[str, Any], of: Repeat, other: Mapping[str, Any], of_other: Repeat) -> str:
    values = [leaves.get(path, _ABSENT) for leaves in (one, other)]
    texts = [value if value is _ABSENT else repr(value) for value in values]
    return f"{path}: {texts[0]} in {of.run}, {texts[1]} in {of_other.run}"


def _is(path: str, field: str) -> bool:
    return path == field or path.endswith(f".{field}")


def _leaf(values: Mapping[str, Any], path: str) -> Any:
    return dict(flatten(values)).get(path)
