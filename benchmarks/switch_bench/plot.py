"""`vime bench plot RECORD ... | --all [DIR]`: draws six pictures per record, and names missing metrics.

A record is a directory with bench.json, which has two sides, or another JSON file with the steps of
runs (switch_bench.loose_records). In such a file every step counts, including the first step.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from slime.tracking.metrics import LOGPROB_DIFF
from switch_bench import curves, record
from switch_bench.compare import pairs_of
from switch_bench.curves import PEAKS, REWARD, Sides
from switch_bench.loose_records import read_runs
from switch_bench.pictures import breakdown
from switch_bench.record import RECORD_FILE, Repeat
from switch_bench.verdicts import STEP
from vime.view.plot import COLOURS, save
from vime.view.run_metrics import TIME_METRICS

LABEL = 32  # characters of a line of a run's name
MOST_NAMED = 3
RESULTS = Path("benchmarks/results")


@dataclass(frozen=True)
class Picture:
    """A picture. To be drawn, a run needs steps with all metrics of `all_of` and, if given, a metric of `any_of`."""

    name: str
    caption: str
    draw: Callable[[int, Sides], Figure | str]
    all_of: tuple[str, ...]
    any_of: tuple[str, ...] = ()

    def lacks(self, repeats: Sequence[Repeat]) -> list[str]:
        """Returns the metrics that a repeat did not record in any step."""
        names = [set[str]().union(*repeat.steps) for repeat in repeats]
        missing = [name for name in self.all_of if not all(name in found for found in names)]
        if self.any_of and not all(found.intersection(self.any_of) for found in names):
            missing.append(f"any of {', '.join(self.any_of)}")
        return missing


PICTURES = (
    Picture("mean_step_time", "Mean step time", curves.mean_step_time, (STEP,)),
    Picture("step_time", "Step time over steps", curves.step_time, (STEP,)),
    Picture("time_breakdown", "Where the time of a step goes", breakdown, (STEP,), TIME_METRICS),
    Picture("peak_memory", "Peak memory", curves.peak_memory, (), PEAKS),
    Picture("raw_reward", "Raw reward", curves.raw_reward, (REWARD,)),
    Picture(
        "logprob_diff", "Log-prob difference of trainer and engine", curves.logprob_diff, (LOGPROB_DIFF,)
    ),
)
WORDS = {", ".join(TIME_METRICS): "the time of a part", ", ".join(PEAKS): "a peak of a GPU's memory"}


def main(argv: Sequence[str]) -> int:
    """Runs `vime bench plot`. ValueError for a path that is not a record, or if no picture can be drawn."""
    parser = argparse.ArgumentParser(prog="vime bench plot", description="The six pictures of records.")
    parser.add_argument(
        "records",
        nargs="*",
        type=Path,
        metavar="RECORD",
        help=f"directory with {RECORD_FILE}, or a JSON file",
    )
    parser.add_argument(
        "--all",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="DIR",
        help=f"every record of DIR, or of {RESULTS}",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/plots"), help="where to write; default %(default)s"
    )
    args = parser.parse_args(argv)
    paths = [*args.records, *(records_of(args.all) if args.all is not None else ())]
    if not paths:
        raise ValueError(
            "RECORD must be given, got none; name one, or give --all DIR for those of a directory"
        )
    written: list[Path] = []
    for path in paths:
        drawn, notes = draw_record(path, args.out)
        written += drawn
        print("\n".join([*map(str, drawn), *(f"note: {path.stem}: {note}" for note in notes)]))
    if not written:
        raise ValueError("RECORD must hold the steps of a run, got none; the notes say what is missing")
    print(f"{len(written)} pictures of {len(paths)} records in {args.out}")
    return 0


def records_of(folder: Path) -> list[Path]:
    """Returns the records in `folder`, by name. ValueError for a folder without records."""
    found = sorted([*(path.parent for path in folder.glob(f"*/{RECORD_FILE}")), *folder.glob("*.json")])
    if not found:
        raise ValueError(
            f"--all must be a folder with records, got {folder}; run in the repository's root, or name it"
        )
    return found


def draw_record(path: Path, out: Path) -> tuple[list[Path], list[str]]:
    """Writes `out`/RECORD-PICTURE.png. Returns the written files, and notes about missing pictures."""
    warm_up, sides, notes = _read(path)
    if not sides:
        return [], [*notes, "no picture, as it holds no step of a run"]
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in PICTURES:
        lacking = {side: lacks for side, repeats in sides.items() if (lacks := picture.lacks(repeats))}
        shown = {side: repeats for side, repeats in sides.items() if side not in lacking}
        notes += _lacking(picture, lacking, len(sides))
        # With more runs than colours, a picture has one run per colour.
        names = list(shown)
        for page, first in enumerate(range(0, len(names), len(COLOURS)), start=1):
            of_page = names[first : first + len(COLOURS)]
            labels = {"\n".join(textwrap.wrap(name, LABEL)): shown[name] for name in of_page}
            figure = picture.draw(warm_up, labels)
            if isinstance(figure, str):
                notes.append(f"{picture.caption}: not drawn, as {figure}")
                continue
            figure.axes[0].set_title(picture.caption, loc="left", fontsize=11, fontweight="bold")
            number = "" if page == 1 else f"-{page}"
            written.append(save(figure, out / f"{path.stem}-{picture.name}{number}.png"))
    return written, notes


def _read(path: Path) -> tuple[int, Sides, list[str]]:
    """Returns (steps of warm-up, sides or runs, notes about omissions)."""
    if path.is_dir():
        found = record.read(path)
        pairs, left_out = pairs_of(found)
        return found.warm_up, curves.sides_of(pairs), left_out
    if not path.is_file():
        raise ValueError(
            f"RECORD must be a directory with {RECORD_FILE} or a JSON file, got {path}; correct the path"
        )
    return 0, {name: [run] for name, run in read_runs(path).items()}, []


def _lacking(picture: Picture, lacking: dict[str, list[str]], runs: int) -> Iterator[str]:
    """Yields one note for all runs that lack the same metrics."""
    same: dict[str, list[str]] = {}
    for side, metrics in lacking.items():
        told = [WORDS.get(name.removeprefix("any of "), name) for name in metrics]
        same.setdefault(" and ".join(told), []).append(side)
    for what, names in same.items():
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        whose = "" if len(names) == runs else f" of {'; '.join(names[:MOST_NAMED])}{more}"
        yield f"{picture.caption}{whose}: not drawn, as {what} was not recorded step by step"
