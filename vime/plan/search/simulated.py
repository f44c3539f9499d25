"""Simulates the layouts of a search whose trainer has separate GPUs, and draws a chart of their times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.hardware import Hardware
from vime.plan.search.lengths import Lengths
from vime.plan.search.results import Searched
from vime.plan.search.step_time import (
    GpuLayout,
    Model,
    PredictedStep,
    Rates,
    decode_time,
    most_sequences,
    update_time,
)
from vime.plan.search.stream import (
    DECODING,
    LOST,
    TRAINING,
    UPDATING,
    WAITING,
    Simulated,
    Simulation,
    StreamParts,
)

STEPS = 10
FAULTS_PER_GPU_HOUR = 1 / 50_000
"""One unexpected interruption in 50,000 GPU hours: 419 interruptions in 54 days of 16,384 H100s (Llama 3, 2407.21783,
part 3.3.4)."""

Row = tuple[str, Simulated, Simulated]
"""(layout, result without faults, result with faults)."""


def simulate(c: Config, gpu: Hardware, lengths: Lengths, searched: Searched) -> list[Row]:
    """Returns the simulation of each layout that is not colocated."""
    model = Model(read_hf_config(c.rollout.hf_checkpoint))
    samples = lengths.spread(c.data.rollout_batch_size * c.data.n_samples_per_prompt)
    rows = []
    for number, one in enumerate(searched.found, 1):
        if one.layout.colocated:
            continue
        found = [
            Simulation(make_stream(model, gpu, one.layout, one.prediction, samples, faults)).run(STEPS)
            for faults in (0.0, FAULTS_PER_GPU_HOUR / 3600)
        ]
        rows.append((f"{number}. {place(one.layout)}", found[0], found[1]))
    return rows


def place(layout: GpuLayout) -> str:
    return (
        f"{layout.trainer_gpus} train, {layout.engines} x {layout.engine_gpus} generate, {layout.ahead} ahead"
    )


def make_stream(
    model: Model,
    gpu: Hardware,
    layout: GpuLayout,
    prediction: PredictedStep,
    samples: Sequence[tuple[int, int]],
    faults: float,
) -> StreamParts:
    """Returns the stream of a layout. `faults` is the number of faults per GPU and second."""
    rates = Rates()
    mean = sum(prompt + response for prompt, response in samples) / len(samples)
    trained = ("forward", "backward", "head and loss", "optimizer", "gradients")

    def token_s(count: int, length: float) -> float:
        return decode_time(model, gpu, layout, count, count * length, rates)

    return StreamParts(
        engines=layout.engines,
        sequences=most_sequences(model, gpu, layout, mean, 256),
        token_s=token_s,
        train_s=sum(prediction.parts[name] for name in trained),
        update_s=update_time(model, rates) + rates.turn_s,
        lengths=samples,
        ahead=layout.ahead,
        engine_faults=faults * layout.engine_gpus,
        trainer_faults=faults * layout.trainer_gpus,
    )


def simulation_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the seconds per step and the shares of the time, per layout."""
    if not rows:
        yield "simulation: no layout above has a trainer on GPUs of its own"
        return
    yield f"simulation of {STEPS} steps, without faults and with one fault in 50,000 GPU hours:"
    for name, quiet, faulty in rows:
        yield f"{name}: {quiet.step_s:.1f} s a step, {faulty.step_s:.1f} s with faults"
        yield f"   engines: {shares(quiet.engine)}; trainer: {shares(quiet.trainer)}"


def shares(of_states: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in of_states.items() if share >= 0.005)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws the shares of the time of engines and trainer as bars. Raises ValueError without a row."""
    if not rows:
        raise ValueError(
            "--plot must have a layout to draw, got none whose trainer has GPUs of its own; leave it out"
        )
    from matplotlib.figure import Figure

    colors = {
        DECODING: "#4c78a8",
        TRAINING: "#54a24b",
        UPDATING: "#eeca3b",
        WAITING: "#d3d3d3",
        LOST: "#e45756",
    }
    figure = Figure(figsize=(9, 1.4 + 0.9 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    labels: list[str] = []
    for name, quiet, _ in rows:
        for side, of_states in (("engines", quiet.engine), ("trainer", quiet.trainer)):
            left = 0.0
            for state, color in colors.items():
                share = of_states.get(state, 0.0)
                axes.barh(len(labels), share, left=left, color=color, label=state if not labels else None)
                left += share
            labels.append(f"{name}\n{side}, {quiet.step_s:.1f} s a step" if side == "engines" else side)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the time (predicted)")
    axes.set_title(title)
    axes.legend(ncols=len(colors), loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
