"""`vime plan --search GPUS FLAGS`: the layouts that fit and take the least time, and what limits each."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from slime.config import Config
from slime.config.config_file import split_argv, with_config_files
from slime.hardware import HARDWARE, Hardware
from slime.plan.fit import Fit, MachineSizes, shortage
from slime.plan.units import GIB
from slime.records.errors import FlagError
from vime.backends import parse_config
from vime.memory.lines import whole_fit
from vime.memory.sizes import take_sizes
from vime.plan.search.layouts import (
    COARSE,
    FINE,
    Grid,
    find_remainders,
    list_layouts,
    spell,
    with_layout,
)
from vime.plan.search.lengths import LENGTHS, Lengths, read_lengths
from vime.plan.search.results import Found, Searched
from vime.plan.search.simulated import draw, simulate, simulation_lines
from vime.plan.search.state_check import StateCheck
from vime.plan.search.step_time import GpuLayout, Model, PredictedStep, StepWork, add_moves, predict

SEARCH, SIMULATE, PLOT = "--search", "--simulate", "--plot"
SHOWN = 5
MOST_CHECKED = {COARSE: 400, FINE: 2000}
"""Layouts whose memory is planned. They are planned in the order of their predicted time."""
SECONDS = 20.0
"""Time for planning the memory of layouts."""
LAYOUT = ("--no-colocate", "--rollout-num-gpus", "8", "--max-tokens-per-gpu", "8192")
"""A layout with which the flags of a run are complete. The search replaces it."""
PROMPT_TOKENS = 256
"""Tokens of a prompt, if the lengths are not given."""
HOST_GIB = 2000.0
"""Memory of a host with eight GPUs, if --host-memory-gib is not given: NVIDIA's "DGX H100 User Guide" names 2 TB."""


def take_option(argv: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """Splits an option with one value off the flags: (the other flags, the value)."""
    rest, value = list[str](), None
    words = iter(argv)
    for word in words:
        written, equals, following = word.partition("=")
        if written == name:
            value = following if equals else next(words, "")
        else:
            rest.append(word)
    return rest, value


def main(argv: Sequence[str]) -> int:
    """Prints the best layouts. Returns 1 if none fits. Raises ValueError for flags that cannot be searched."""
    rest, text = take_option(argv, SEARCH)
    rest, lengths_text = take_option(rest, LENGTHS)
    rest, picture = take_option(rest, PLOT)
    simulates = SIMULATE in rest
    rest = [word for word in rest if word != SIMULATE]
    flags, sizes = take_sizes(rest)
    gpus = read_count(text)
    c = parse_config([*flags, *LAYOUT])
    if (several := c.cluster.rollout_engines_per_gpu) > 1:
        raise FlagError(
            "--rollout-engines-per-gpu", f"be 1 with {SEARCH}", several, "add --rollout-engines-per-gpu 1"
        )
    if c.cluster.gpu is None:
        raise ValueError(f"{SEARCH} must go with --gpu, got none; name one of {', '.join(sorted(HARDWARE))}")
    gpu = HARDWARE[c.cluster.gpu]
    machine = MachineSizes((sizes.gpu or gpu.memory_gib) * GIB, (sizes.host or HOST_GIB) * GIB)
    lengths = read_lengths(lengths_text, PROMPT_TOKENS, c.rollout.rollout_max_response_len or 1)
    flag_names = {group.name for group in with_config_files(split_argv(flags))}
    kinds = (False,) if "no_use_precision_aware_optimizer" in flag_names else find_remainders(c)
    found = search(c, gpu, gpus, lengths, machine, kinds)
    print("\n".join(report(c, gpu, gpus, lengths, found)))
    if simulates or picture is not None:
        rows = simulate(c, gpu, lengths, found)
        print("\n".join(simulation_lines(rows)))
        if picture is not None:
            draw(rows, Path(picture), f"{gpus} {gpu.name}")
            print(f"{picture}: where the time of engines and trainer goes")
    return int(not found.found)


def read_count(text: str | None) -> int:
    try:
        gpus = int(text or "")
    except ValueError:
        gpus = 0
    if gpus < 1:
        raise ValueError(
            f"{SEARCH} must be a number of GPUs above 0, got {text or 'none'}; for example {SEARCH} 64"
        )
    return gpus


def search(
    c: Config, gpu: Hardware, gpus: int, lengths: Lengths, machine: MachineSizes, kinds: tuple[bool, ...]
) -> Searched:
    """Returns the `SHOWN` layouts of `gpus` GPUs with the least predicted time that fit the machine. `kinds` has the
    kinds of main weights (`list_layouts`). If no planned layout of the coarse grid fits, the fine grid is searched."""
    from slime.checkpoints.hf_config import read_hf_config

    model = Model(read_hf_config(c.rollout.hf_checkpoint))
    work = StepWork(model, tuple(lengths.spread(c.data.rollout_batch_size * c.data.n_samples_per_prompt)))
    check = StateCheck(c, model, gpu, machine)
    ahead, possible, checked = max(0, c.rollout.max_staleness or 0), 0, 0
    closest = float("inf"), ""
    for grid in (COARSE, FINE):
        every = list_layouts(model, gpu, gpus, lengths.longest, ahead, kinds, grid)
        layouts = (
            one for one in every if grid is COARSE or one.colocated or one.host_adam not in COARSE.host_adam
        )
        searched = _search_grid(c, gpu, layouts, work, check, grid, machine)
        possible, checked = possible + searched.possible, checked + searched.checked
        closest = min(closest, (searched.missing, searched.short))
        if searched.found:
            break
    return Searched(searched.found, check.count, possible, checked, *closest)


def _search_grid(
    c: Config,
    gpu: Hardware,
    layouts: Iterator[GpuLayout],
    work: StepWork,
    check: StateCheck,
    grid: Grid,
    machine: MachineSizes,
) -> Searched:
    """Plans the possible layouts of one grid in the order of their predicted time."""
    hf, order = work.model.hf, itertools.count()
    predicted: list[tuple[float, int, GpuLayout, PredictedStep, Fit | None]] = [
        (prediction.step, next(order), layout, prediction, None)
        for layout, prediction in _predictions(c, gpu, filter(check.is_possible, layouts), work)
    ]
    heapq.heapify(predicted)
    possible = len(predicted)
    found, closest, checked, ends = list[Found](), (float("inf"), ""), 0, time.monotonic() + SECONDS
    if not possible and check.closest is not None:
        closest = _describe_short(
            gpu, check.closest, whole_fit(with_layout(c, gpu, check.closest), hf, machine)
        )
    while predicted and len(found) < SHOWN:
        _, _, layout, prediction, fit = heapq.heappop(predicted)
        if fit is None and (checked == MOST_CHECKED[grid] or time.monotonic() > ends):
            continue  # the layouts that are known to fit are still added
        if any(has_same_split(layout, other.layout) for other in found):
            continue
        if fit is not None:
            found.append(Found(layout, prediction, fit))
            continue
        checked += 1
        fit = whole_fit(with_layout(c, gpu, layout), hf, machine)
        if fit.over <= 0 and layout.offload is None and fit.moved:
            # The plan has decided which parts leave the GPU, so the time of the move is known only now.
            exact = add_moves(prediction, fit.moved)
            heapq.heappush(predicted, (exact.step, next(order), layout, exact, fit))
        elif fit.over <= 0:
            found.append(Found(layout, prediction, fit))
        elif fit.over < closest[0]:
            closest = _describe_short(gpu, layout, fit)
    return Searched(found, check.count, possible, checked, *closest)


def _predictions(
    c: Config, gpu: Hardware, layouts: Iterable[GpuLayout], work: StepWork
) -> Iterator[tuple[GpuLayout, PredictedStep]]:
    """Yields each layout with the times of a step. Layouts with the same engines share the time of the rollout."""
    rollouts: dict[tuple[int, int, float, int], float] = {}
    for layout in layouts:
        engines = layout.engines, layout.engine_gpus, layout.share, layout.ahead
        prediction = predict_layout(c, work.model, gpu, layout, work, rollouts.get(engines))
        rollouts[engines] = prediction.parts["rollout"]
        yield layout, prediction


def _describe_short(gpu: Hardware, layout: GpuLayout, fit: Fit) -> tuple[float, str]:
    """Returns the missing bytes of a layout that does not fit, and a text with them and the layout's flags."""
    assert fit.worst is not None
    return fit.over, f"{shortage(fit.worst)}, with {spell(gpu, layout)}"


def predict_layout(
    c: Config,
    model: Model,
    gpu: Hardware,
    layout: GpuLayout,
    work: StepWork,
    rollout_s: float | None,
) -> PredictedStep:
    """Returns the times of a step of this run in a layout."""
    references = int(bool(c.algorithm.use_kl_loss or c.algorithm.kl_coef))
    size = c.data.global_batch_size or len(work.samples)
    return predict(
        *(model, gpu, layout, work),
        per_prompt=c.data.n_samples_per_prompt,
        passes=references + int(size < len(work.samples)),
        optimizer_steps=max(1, len(work.samples) // size),
        rollout_s=rollout_s,
    )


def has_same_split(one: GpuLayout, other: GpuLayout) -> bool:
    """Returns whether two layouts differ only in micro-batches, recomputation, offload, main weights and the engine's
    share."""
    values = ("micro_tokens", "recompute", "offload", "host_adam", "remainders", "share")
    return dataclasses.replace(one, **{name: getattr(other, name) for name in values}) == other


def report(c: Config, gpu: Hardware, gpus: int, lengths: Lengths, searched: Searched) -> Iterator[str]:
    yield (
        f"{gpus} {gpu.name}: {searched.layouts:,} layouts, {searched.possible:,} with room for the trainer's state, "
        f"the memory of {searched.checked} planned in the order of their predicted time"
    )
    yield (
        f"a step of {c.data.rollout_batch_size} x {c.data.n_samples_per_prompt} samples, on average "
        f"{lengths.mean_prompt:,.0f} + {lengths.mean_response:,.0f} tokens, the longest {lengths.longest:,} "
        f"({lengths.source})"
    )
    if not searched.found:
        what = "no layout of this search fits"
        if searched.checked < searched.possible:
            what = f"none of the {searched.checked} planned layouts fits"
        yield f"{what}; the closest needs {searched.short or 'more GPUs than there are'}"
        return
    for number, one in enumerate(searched.found, 1):
        yield from describe(number, gpu, one)
    yield "times are predictions: docs/plan-search.md has their errors against measured steps"


def describe(number: int, gpu: Hardware, one: Found) -> Iterator[str]:
    layout, parts = one.layout, one.prediction.parts
    place = (
        "trainer and engines share GPUs" if layout.colocated else "trainer and engines on GPUs of their own"
    )
    if layout.ahead:
        place += f", generation {layout.ahead} ahead"
    yield f"{number}. {one.prediction.step:.1f} s a step: {place}"
    yield (
        f"   trainer TP {layout.tp} PP {layout.pp} CP {layout.cp} EP {layout.ep} DP {layout.dp}; {layout.engines} x "
        f"engines of {layout.engine_gpus}"
    )
    yield "   " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds >= 0.005)
    worst = one.fit.worst
    full = (
        ""
        if worst is None
        else f"; fullest {worst.of} {worst.bytes / GIB:.1f} of {worst.limit / GIB:.1f} GiB ({worst.phase})"
    )
    yield f"   most time: {one.prediction.binds}{full}"
    yield f"   {spell(gpu, layout)}"
