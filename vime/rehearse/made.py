"""Keeps the files that a script made in its layer and that its training command names: rows, config.json, a tokenizer.

The layer is removed after the capture. Without this step, a rehearsal would not find the files that the script
prepares.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from vime.rehearse.capture import CapturedLaunch

MOST_BYTES = 2**28


def keep_made(
    launch: CapturedLaunch, project: Path, layer: Path, kept: Path
) -> tuple[CapturedLaunch, list[str]]:
    """Copies these files from `layer` to `kept`. Returns the launch with the new paths, and the old paths."""
    argv, found = list(launch.argv), list[str]()
    for i, word in enumerate(argv):
        name, at, part = word.partition("@[")
        path = launch.folder.resolve() / name
        if (
            word.startswith("-")
            or not set(name) & set("./")
            or path.exists()
            or not path.is_relative_to(project)
        ):
            continue
        inside = path.relative_to(project)
        made, copy = layer / inside, kept / inside
        if not made.exists() or _count_bytes(made) > MOST_BYTES:
            continue
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(made, copy) if made.is_dir() else shutil.copyfile(made, copy)
        argv[i] = f"{copy}{at}{part}"
        found.append(name)
    return replace(launch, argv=argv), found


def _count_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
