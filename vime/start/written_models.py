"""Checks that a run or an export writes to no folder of a model, or of another program, before anything starts.

A run writes config.json, checkpoints and the markers of its newest checkpoint. In the folder of a model they replace
the model's files, or change the weights that the next run loads.
"""

from __future__ import annotations

import re
from pathlib import Path

from slime.checkpoints.checkpoint_dir import require_no_model, resumed_iteration, saves_where_it_loads
from slime.config import Config
from slime.config.schema import SECTIONS
from slime.records.errors import FlagError
from slime.tracking.run_files import read_object
from vime.run.lock import written_folders

_ROLLOUT_ID = re.compile(r"\{rollout_id[^}]*\}")


def check_written_models(c: Config) -> None:
    """Raises ValueError if the run would write to the folder of a model, or replace another program's config.json.

    A run that resumes from --save writes there as its first start did.
    """
    try:
        resumes = resumed_iteration(c) is not None and saves_where_it_loads(c)
    except ValueError:
        return  # a rule of --load reports this error
    for flag, folder in written_folders(c).items():
        if folder is not None and (flag == "--run-dir" or not resumes):
            require_no_model(flag, folder)
    _require_own_config(Path(c.logging.run_dir))
    if c.checkpoint.save_hf is not None:
        _check_save_hf(c, c.checkpoint.save_hf, resumes or c.checkpoint.overwrite)


def _require_own_config(run_dir: Path) -> None:
    """Raises ValueError if config.json in the folder is not that of a run."""
    path = run_dir / "config.json"
    if path.is_file() and not SECTIONS.keys() & read_object(run_dir, path.name).keys():
        raise FlagError(
            "--run-dir",
            "be a folder whose config.json is that of a run",
            f"{path}, which a run would replace",
            "name another folder",
        )


def _check_save_hf(c: Config, save_hf: str, replaces: bool) -> None:
    """Raises ValueError if --save-hf names a folder that the run reads or writes in another way. For a new run, its
    folders may not hold a model; a run that resumes or has --overwrite replaces the models of its first start."""
    read = (c.rollout.hf_checkpoint, c.checkpoint.load, c.checkpoint.ref_load)
    others = {Path(folder).resolve() for folder in (*read, *written_folders(c).values()) if folder}
    pattern = Path(save_hf).absolute()
    first = next((n for n, part in enumerate(pattern.parts) if _ROLLOUT_ID.search(part)), len(pattern.parts))
    root, rest = Path(*pattern.parts[:first]), _ROLLOUT_ID.sub("*", "/".join(pattern.parts[first:]))
    for folder in sorted(root.glob(rest)) if rest else [root]:
        if folder.resolve() in others:
            raise FlagError(
                "--save-hf",
                "be a folder of its own",
                f"{folder}, which the run uses for something else",
                "name another folder",
            )
        if not replaces:
            require_no_model("--save-hf", folder)
