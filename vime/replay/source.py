"""Reads the data of a replay from a run directory: flags, receipts, saved rollouts, and the state before the replay.

start of the run or a checkpoint K  ->  rollouts K+1, ..., N from their saved samples
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slime.checkpoints.checkpoint_dir import iteration_path, resumed_iteration, saves_where_it_loads
from slime.checkpoints.checkpoint_files import iterations
from slime.config import Config
from slime.receipts.chain import Record, read_chain
from slime.receipts.flags import FOLDER
from slime.roles.groups import build_groups
from slime.tracking.environment import ENVIRONMENT_FILE
from slime.tracking.run_files import read_object
from slime.tracking.run_summary import run_summary
from vime.audit.source import read_config, saved_rollouts

_FILE = re.compile(r"trainer-(\d+)\.jsonl")


@dataclass(frozen=True)
class RecordedRun:
    """A run directory. `receipts`: the records per rank. `samples`: the path template of
    each saved rollout."""

    directory: Path
    config: Config
    receipts: list[list[Record]]
    samples: dict[int, str]

    @property
    def ranks(self) -> int:
        return self.config.world_size

    def step(self, rank: int, rollout: int) -> Record | None:
        """Returns the last record of a trained rollout: a run that was restarted may have trained it twice."""
        found = [one for one in self.receipts[rank] if one["kind"] == "step" and one["rollout"] == rollout]
        return found[-1] if found else None

    @property
    def steps(self) -> list[int]:
        """Returns the rollouts that the receipt of rank 0 has."""
        return sorted({one["rollout"] for one in self.receipts[0] if one["kind"] == "step"})

    def state_before(self, rank: int, rollout: int) -> dict[str, str]:
        """Returns the digests of weights and optimizer before a rollout: those after the one before, or those of the
        start."""
        before = self.step(rank, rollout - 1)
        if before is not None:
            return dict(before["state"])
        starts = [one for one in self.receipts[rank] if one["kind"] == "begin" and one["first"] == rollout]
        return dict(starts[-1]["state"]) if starts else {}


@dataclass(frozen=True)
class StartState:
    """The state from which a replay starts. `iteration`: the checkpoint in `folder`, None for the run's own start."""

    first: int
    folder: str | None = None
    iteration: int | None = None

    @property
    def is_there(self) -> bool:
        """Returns whether the files of the checkpoint exist."""
        return self.folder is not None and self.iteration in iterations(Path(self.folder))

    def __str__(self) -> str:
        if self.iteration is None:
            return f"the start of the run (step {self.first})"
        return f"the checkpoint {iteration_path(Path(self.folder or ''), self.iteration)}"


def receipt_files(run_dir: Path) -> list[str]:
    """Returns the names of the receipts in a run directory, in the order of the ranks."""
    names = [path.name for path in (run_dir / FOLDER).glob("trainer-*.jsonl")]
    found = sorted((int(match[1]), name) for name in names if (match := _FILE.fullmatch(name)))
    return [f"{FOLDER}/{name}" for _, name in found]


def read_receipts(run_dir: Path, public: str | None = None) -> list[list[Record]]:
    """Returns the checked records per rank. Raises ValueError for a run without a receipt, and for a missing rank."""
    names = receipt_files(run_dir)
    chains = [read_chain(run_dir, name, public) for name in names or [f"{FOLDER}/trainer-0.jsonl"]]
    ranks = chains[0][-1].get("ranks") or next(one["ranks"] for one in chains[0] if one["kind"] == "begin")
    if len(chains) != ranks:
        raise ValueError(
            f"RUN must have the receipts of {ranks} ranks, got {len(chains)} in {run_dir / FOLDER}; copy all files of "
            "the run"
        )
    return chains


def read_run(run_dir: Path, public: str | None = None) -> RecordedRun:
    """Returns the record of a run. Raises ValueError without a receipt, without samples, and for a broken chain."""
    config = read_config(run_dir)
    receipts = read_receipts(run_dir, public)
    if len(build_groups(config)) > 1:
        raise ValueError(
            "RUN must have one group of trainer ranks, got separate devices for the critic; a replay does not cover "
            "such a run"
        )
    began_in = Path(str(read_object(run_dir, ENVIRONMENT_FILE).get("directory", ".")))
    moved = {
        name: _moved(value, config.logging.run_dir, run_dir, began_in)
        for name in ("save_debug_rollout_data", "save_debug_train_data", "save", "load")
        if (value := config.get_value(name)) is not None
    }
    config = config.with_values(run_dir=str(run_dir), **moved)
    return RecordedRun(run_dir, config, receipts, saved_rollouts(run_dir, config))


def _moved(path: str, before: str, now: Path, began_in: Path) -> str:
    """Returns a path of the run in the run directory's present place, if it was inside the directory. `began_in` is the
    working directory of the run."""
    try:
        return str(now.absolute() / (began_in / path).relative_to(began_in / before))
    except ValueError:
        return str(began_in / path)


def find_start(run: RecordedRun, rollout: int, *, before: int | None = None) -> StartState:
    """Returns the nearest earlier state from which rollout `rollout` can be computed, from iterations below `before`.

    Raises ValueError if samples of a rollout in between are missing.
    """
    config = run.config
    save, limit = config.checkpoint.save, rollout if before is None else before
    usable = not (config.checkpoint.no_save_optim or config.algorithm.ref_update_interval)
    saved = iterations(Path(save)) if save and usable else []
    known = [i for i in saved if i < min(rollout, limit) and run.step(0, i) is not None]
    start = StartState(max(known) + 1, save, max(known)) if known else _first_start(run)
    missing = [i for i in range(start.first, rollout + 1) if i not in run.samples]
    if missing or start.first > rollout:
        raise ValueError(
            f"--step {rollout} must have the samples for each step since {start}, got none of {missing or rollout}; "
            "restore the files of --save-debug-rollout-data"
        )
    return start


def _first_start(run: RecordedRun) -> StartState:
    config, first = run.config, run.receipts[0][0]["first"]
    own = saves_where_it_loads(config)
    if not own and (iteration := resumed_iteration(config)) is not None:
        return StartState(first, config.checkpoint.load, min(iteration, first - 1))
    return StartState(first)


def check_step(run: RecordedRun, rollout: int) -> None:
    """Raises ValueError for a step that the receipt does not have."""
    if rollout not in run.steps:
        shown = f"{run.steps[0]} to {run.steps[-1]}" if run.steps else "none"
        raise ValueError(
            f"--step must be a trained step of RUN ({shown}) or all, got {rollout}; see its receipt/"
        )


def last_trained(run_dir: Path) -> int | None:
    """Returns the last rollout that the journal reports as trained, None without one."""
    return run_summary(run_dir).rollout
