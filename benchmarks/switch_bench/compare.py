"""Checks whether the runs of a record can be compared, by configurations and environments, and pairs the repeats.

Runs that differ in more than the switch, or in hardware, drivers, versions or code, are a ValueError that lists every
difference. EXCEPTED, PER_PAIR and RUN_FLAGS have the allowed differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from switch_bench.record import BASELINE, RL_KERNEL, SIDES, Record, Repeat, Switch, by_order
from vime.view.measures import EXCEPTED, RUN_FLAGS, config_flags, flatten

PER_PAIR = ("seed", "rollout_seed")
"""Configuration fields that may differ between pairs of repeats, but not between the two runs of a pair."""
KERNEL_SWITCHES = ("rlk_fast", "rl_kernel_ops")
MOST_LISTED = 20

Pair = tuple[Repeat, Repeat]
_ABSENT = "(absent)"


def refuse_unlike(name: str, switch: Switch, pairs: Sequence[Pair]) -> None:
    """Raises a ValueError that lists every difference, unless the runs of `pairs` differ only in the switch."""
    problems = [
        *_switch_problems(switch, pairs),
        *_config_problems(switch.field, pairs),
        *_environment_problems(pairs),
    ]
    if not problems:
        return
    listed = "; ".join(problems[:MOST_LISTED])
    more = f"; and {len(problems) - MOST_LISTED} more" if len(problems) > MOST_LISTED else ""
    raise ValueError(
        f"{name}: runs must differ in {switch.field} alone to be compared, got {listed}{more}; "
        "give both sides one configuration, on one machine, of one version"
    )


def pairs_of(record: Record) -> tuple[list[Pair], list[str]]:
    """Returns (pairs of finished repeats, repeat i with repeat i; repeats that were left out, with reasons).

    ValueError if no pair is left.
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
    """Returns the runs of `pairs` in the order of their starts."""
    return by_order(repeat for pair in pairs for repeat in pair)


def cautions(record: Record, pairs: Sequence[Pair]) -> list[str]:
    """Returns cautions that a reader of the comparison needs."""
    found = []
    apart = [f"{a.run} and {b.run}" for a, b in pairs if abs(a.order - b.order) > 1]
    if apart:
        found.append(
            f"Other runs were between {', '.join(apart)}: what drifted over time is in their differences."
        )
    elif all(a.order < b.order for a, b in pairs):
        found.append(
            f"{BASELINE} ran first in every pair: a drift of 1 % from run to run adds one point to each difference."
        )
    environments = [_environment(repeat) for repeat in in_order(pairs)]
    hosts = {str(name) for leaves in environments if (name := leaves.get("host.name"))}
    if len(hosts) > 1:
        found.append(f"The runs are of several hosts of the same kind: {', '.join(sorted(hosts))}.")
    if any(leaves.get("git.commit") is None for leaves in environments):
        found.append("Which commit was measured is not known for all runs.")
    if any(leaves.get("git.modified") for leaves in environments):
        found.append("The checkout had changes that are in no commit.")
    return [*found, *_kernel_cautions(record, pairs)]


def _kernel_cautions(record: Record, pairs: Sequence[Pair]) -> list[str]:
    """Returns cautions if the side with kernels did not run them."""
    found = []
    switch = record.switch
    steps = [step for _, repeat in pairs for step in repeat.steps[record.warm_up :]]
    ran, idle = any(step.get("rl_kernel/fast") for step in steps), set[str]()
    if ran and switch.field == "rl_kernel_ops":
        ours, theirs = set(switch.rl_kernel), set(switch.baseline)
        idle = {op for op in ours ^ theirs if not any(step.get(f"rl_kernel/{op}/calls") for step in steps)}
        # Only operators that the baseline does not have count. An operator that fell back in every call ran no kernel.
        ran = any(
            step.get(f"rl_kernel/{op}/calls", 0) > step.get(f"rl_kernel/{op}/fallbacks", 0)
            for step in steps
            for op in ours - theirs
        )
    if switch.field in KERNEL_SWITCHES and not ran:
        found.append(
            f"No kernel ran in {RL_KERNEL} that {BASELINE} did not run: nothing here is about kernels."
        )
    if idle:
        found.append(f"Switched and never called: {', '.join(sorted(idle))}.")
    calls = sum((Counter(repeat.fallbacks) for _, repeat in pairs), Counter[str]())
    if fell := [f"{operator} ({count:,} calls)" for operator, count in sorted(calls.items())]:
        found.append(f"Part of {RL_KERNEL} ran no kernel: {', '.join(fell)} fell back.")
    return found


def _unusable(repeat: Repeat) -> str | None:
    if not repeat.finished:
        return f"{repeat.run} did not finish ({len(repeat.steps)} steps)"
    on_gpus = config_flags(repeat.config).get("device") == "cuda"
    if on_gpus and repeat.environment and not repeat.environment.get("gpus"):
        return f"{repeat.run} does not say on which GPUs it ran (nvidia-smi did not answer)"
    return None


def _switch_problems(switch: Switch, pairs: Sequence[Pair]) -> list[str]:
    field = switch.field
    if switch.baseline == switch.rl_kernel:
        return [f"{field}: {switch.baseline!r} on both sides"]
    if not any(repeat.config for pair in pairs for repeat in pair):
        return ["no configuration at all"]
    found = []
    for side, repeat in ((side, repeat) for pair in pairs for side, repeat in zip(SIDES, pair, strict=True)):
        flags = config_flags(repeat.config)
        if flags.get(field, _ABSENT) != switch.of(side):
            found.append(
                f"{field}: {_said(flags, field)} in {repeat.run}, {switch.of(side)!r} is the switch's"
            )
    return found


def _config_problems(field: str, pairs: Sequence[Pair]) -> list[str]:
    """Compares each run with the first run. Fields of PER_PAIR are compared within the pair."""
    excepted = (field, *PER_PAIR)
    first = pairs[0][0]
    of_all = [
        _unequal(first, repeat, _comparable_config, lambda path: _name(path) not in excepted)
        for repeat in in_order(pairs)
    ]
    of_pairs = [_unequal(*pair, _comparable_config, lambda path: _name(path) in PER_PAIR) for pair in pairs]
    return [problem for found in (*of_all, *of_pairs) for problem in found]


def _environment_problems(pairs: Sequence[Pair]) -> list[str]:
    first, *others = in_order(pairs)
    if unknown := [repeat.run for repeat in (first, *others) if not repeat.environment]:
        return [f"no environment (hardware, versions) of {', '.join(unknown)}"]
    found = [_unequal(first, repeat, _environment, lambda path: path not in RUN_FLAGS) for repeat in others]
    return [problem for of_one in found for problem in of_one]


def _unequal(
    one: Repeat,
    other: Repeat,
    leaves_of: Callable[[Repeat], dict[str, object]],
    counts: Callable[[str], bool],
) -> list[str]:
    """Returns the differing leaves of two runs, among the leaves whose path `counts`."""
    a, b = leaves_of(one), leaves_of(other)
    return [
        f"{path}: {_said(a, path)} in {one.run}, {_said(b, path)} in {other.run}"
        for path in {**a, **b}
        if counts(path) and a.get(path, _ABSENT) != b.get(path, _ABSENT)
    ]


def _comparable_config(repeat: Repeat) -> dict[str, object]:
    """Returns the leaves of the configuration. Directories of the run are replaced by their purpose."""
    run_dir: str = config_flags(repeat.config).get("run_dir") or ""

    def told(path: str, value: object) -> object:
        if (name := _name(path)) in EXCEPTED:
            return value if value is None else f"<{name}>"
        if isinstance(value, str) and run_dir and (value == run_dir or value.startswith(f"{run_dir}/")):
            return "<run_dir>" + value[len(run_dir) :]
        return value

    return {path: told(path, value) for path, value in flatten(repeat.config)}


def _environment(repeat: Repeat) -> dict[str, object]:
    return dict(flatten(repeat.environment))


def _said(values: Mapping[str, object], path: str) -> str:
    return repr(values[path]) if path in values else _ABSENT


def _name(path: str) -> str:
    return path.rpartition(".")[2]
