"""Whether a file that the page reads is one of the run: a link may lead out of its directory."""

from __future__ import annotations

from pathlib import Path


def inside(run_dir: Path, path: Path) -> Path:
    """`path`, which is in `run_dir` also after its links. ValueError otherwise: the page would show another file."""
    if not path.resolve().is_relative_to(run_dir.resolve()):
        raise ValueError(
            f"the files of a run must be in its directory, got {path}, a link to {path.resolve()}; copy the file there"
        )
    return path
