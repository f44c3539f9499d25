"""Tests removal of older checkpoints: real folders, and the folders that a flag of the run names."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.checkpoints.checkpoint_files import iterations
from slime.checkpoints.retention import after_save, named, prune
from slime.config import Config


def folder(root: Path, *numbers: int, latest: int, positions: tuple[int, ...] = ()) -> Path:
    for number in numbers:
        path = root / f"iter_{number:07d}"
        path.mkdir(parents=True)
        (path / "metadata.json").write_text("{}")
        (path / "__0_0.distcp").write_text("weights")
    (root / "latest_checkpointed_iteration.txt").write_text(str(latest))
    (root / "rollout").mkdir(exist_ok=True)
    for number in positions:
        (root / "rollout" / f"data_state_{number}.json").write_text("{}")
    return root


def positions(root: Path) -> list[str]:
    return sorted(file.name for file in (root / "rollout").iterdir())


@pytest.mark.parametrize(
    ("keep", "latest", "spared", "left"),
    [
        (1, 9, set(), [9]),
        (2, 9, set(), [7, 9]),
        (9, 9, set(), [1, 3, 5, 7, 9]),
        (2, 9, {3}, [3, 7, 9]),
        (1, 5, set(), [5, 7, 9]),  # 7 and 9 are of an earlier run, which went further
    ],
)
def test_the_last_ones_stay(tmp_path, keep, latest, spared, left):
    folder(tmp_path, 1, 3, 5, 7, 9, latest=latest)
    prune(tmp_path, keep, spared)
    assert iterations(tmp_path) == left
    assert not list(tmp_path.glob(".iter*"))


def test_an_incomplete_iteration_is_no_checkpoint(tmp_path):
    """An incomplete checkpoint is neither counted nor removed. One whose save stopped between two renames counts
    under its number."""
    folder(tmp_path, 1, 2, 3, 4, latest=4)
    (tmp_path / "iter_0000003" / "metadata.json").unlink()
    (tmp_path / "iter_0000002").rename(tmp_path / ".iter_0000002.old")
    prune(tmp_path, 2, ())
    assert iterations(tmp_path) == [2, 4]
    assert (tmp_path / "iter_0000003").is_dir() and not (tmp_path / "iter_0000001").exists()
    prune(tmp_path, 1, ())
    assert iterations(tmp_path) == [4] and not (tmp_path / ".iter_0000002.old").exists()


def test_what_another_flag_names_stays(tmp_path):
    save = folder(tmp_path / "save", 1, 2, 3, 4, latest=4, positions=(0, 1, 2, 3, 4, 5))
    flags = {"save": str(save), "max_actor_ckpt_to_keep": 1, "ckpt_step": 2, "hf_checkpoint": "m"}
    elsewhere = Config.from_flat(flags | {"load": str(tmp_path / "other")})
    assert named(elsewhere) == set()
    here = Config.from_flat(flags | {"load": f"{save}/", "ref_load": str(save), "ref_ckpt_step": 1})
    assert named(here) == {1, 2}
    after_save(here, save)
    assert iterations(save) == [1, 2, 4]
    assert positions(save) == [f"data_state_{i}.json" for i in (1, 2, 4, 5)]  # rollout 5 is in progress


def test_without_the_flags_nothing_is_removed(tmp_path):
    save = folder(tmp_path, 1, 2, latest=2, positions=(0, 1, 2))
    after_save(Config.from_flat({"save": str(save)}), save)
    assert iterations(save) == [1, 2] and len(positions(save)) == 3
    after_save(Config.from_flat({"save": str(save), "exit_signal_handler": True}), save)
    assert iterations(save) == [1, 2] and positions(save) == ["data_state_1.json", "data_state_2.json"]
