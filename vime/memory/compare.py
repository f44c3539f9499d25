"""`vime plan --compare RUN_DIR`: compares the plan of a run with its measurements, by phase, for its cards and its
host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.memory.measured import Measured, read_measured
from slime.plan.fit import Fit, MachineSizes
from slime.plan.host_phases import SYSTEM
from slime.plan.units import GIB
from slime.tracking.run_files import read_object
from slime.tracking.run_summary import run_summary
from vime.memory.lines import whole_fit

COMPARE = "--compare"
CLOSE = 0.05
"""A plan is good if it differs from the measurement by at most this share."""


def compare_run(argv: Sequence[str]) -> int:
    """Prints the tables. Returns 1 if a card or the host used over 5% more than the plan in some phase.

    Such a plan may accept a run that runs out of memory.
    """
    if len(argv) != 1:
        raise ValueError(
            f"{COMPARE} must have one run directory, got {len(argv)}; name the --run-dir of a run and no other flag"
        )
    run_dir = Path(argv[0])
    found = read_measured(run_dir)
    if not found:
        raise ValueError(
            f"RUN_DIR must have events of the kind memory, got none in {run_dir}; runs of this version write them"
        )
    config = read_run_config(run_dir)
    planned = plan_measured(config, found)
    print("\n".join([*lines(planned, found), *_allocator(run_dir)]))
    more = {name: part for name, part in ratios(planned, found).items() if part > 1 + CLOSE}
    off = ", ".join(f"{name} {part:.2f} of the plan" for name, part in more.items())
    print(f"more than the plan: {off}" if more else "no phase had more than the plan by over 5%")
    return int(bool(more))


def read_run_config(run_dir: Path) -> Config:
    """Returns the configuration that a run saved. Raises ValueError if the run saved none."""
    saved = read_object(run_dir, "config.json")
    if not saved:
        raise ValueError(
            f"RUN_DIR must be a run directory of vime train, got no config.json in {run_dir}; see --run-dir"
        )
    return Config.from_dict(saved)


def plan_measured(config: Config, found: Mapping[str, Measured]) -> Fit:
    """Returns the plan for the machine on which the run was measured."""
    card = next((each.card_total for each in found.values() if each.card_total is not None), None)
    host = next((each.host_total for each in found.values() if each.host_total is not None), None)
    before = next((each.before for each in found.values() if each.before is not None), None)
    system = SYSTEM if before is None else before * GIB
    machine = MachineSizes(None if card is None else card * GIB, None if host is None else host * GIB, system)
    return whole_fit(config, read_hf_config(config.rollout.hf_checkpoint), machine)


def ratios(planned: Fit, found: Mapping[str, Measured]) -> dict[str, float]:
    """Maps "card, training" and the like to measured / planned, for the values that both have."""
    values: dict[str, float] = {}
    for phase, seen in found.items():
        card, host = planned_card(planned, phase), planned_host(planned, phase)
        if seen.card is not None and card:
            values[f"card, {phase}"] = seen.card / card
        if seen.host and host:
            values[f"host, {phase}"] = seen.host / host
    return values


def planned_card(planned: Fit, phase: str) -> float | None:
    """Returns the planned GiB on the fullest card of the trainer ranks."""
    return max((card[phase] / GIB for card in planned.cards.values() if phase in card), default=None)


def planned_host(planned: Fit, phase: str) -> float | None:
    return None if planned.host is None else planned.host.sum_phase(phase) / GIB


def lines(planned: Fit, found: Mapping[str, Measured]) -> Iterator[str]:
    """Yields two tables: the sums by phase, and each phase's processes."""
    yield f"{'GiB':<14}{'card: plan':>12}{'measured':>10}{'of plan':>9}{'host: plan':>14}{'measured':>10}{'of plan':>9}"
    for phase, seen in found.items():
        card, host = planned_card(planned, phase), planned_host(planned, phase)
        yield f"{phase:<14}" + _cells(card, seen.card, 12) + _cells(host, seen.host, 14)
    for phase, seen in found.items():
        yield ""
        yield f"{phase}: processes, GiB of the host (own, shared, files, PSS) and of the fullest card"
        on_card = seen.fullest()
        for role in sorted({*seen.processes, *on_card}):
            sizes = seen.processes.get(role, {})
            own = [sizes.get(f"{name}_gib") for name in ("anonymous", "shared", "files", "pss")]
            yield f"  {role:<16}" + "".join(_cell(value, 10) for value in (*own, on_card.get(role)))


def _allocator(run_dir: Path) -> Iterator[str]:
    """Yields the numbers that rank 0 of the trainer counted in the newest step. A container may hide the processes on a
    card."""
    newest = run_summary(run_dir).metrics
    names = {
        "perf/trainer_peak_gib": "tensors",
        "perf/memory/estimate_gib": "of them planned",
        "perf/trainer_reserved_gib": "with the gaps and cached blocks of the allocator",
    }
    peaks = [f"{text} {newest[name]:.2f}" for name, text in names.items() if name in newest]
    if peaks:
        yield ""
        yield f"training: rank 0 of the trainer, GiB: {', '.join(peaks)}"


def _cells(planned: float | None, seen: float | None, width: int) -> str:
    part = seen / planned if planned and seen is not None else None
    return _cell(planned, width) + _cell(seen, 10) + _cell(part, 9)


def _cell(value: float | None, width: int) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>{width}}"
