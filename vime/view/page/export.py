"""Writes one HTML file with the page and the data of its runs, for people who do not have the run directories."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slime.system.disk_space import DiskSpaceGuard
from vime.view.page.cached import to_json
from vime.view.page.html import exported_page
from vime.view.page.run_data import Json, RunData

MOST_BYTES = 32 * 2**20
"""Maximum bytes of JSON for the samples of a file's runs together. The newest samples are kept."""


def write_page(runs: Sequence[RunData], path: Path) -> str:
    """Writes the file, and returns a line with its contents. Raises ValueError if it cannot be written."""
    if path.suffix != ".html":
        raise ValueError(f"--export must name an .html file, got {path}; browsers open it by that name")
    if not path.parent.is_dir():
        raise ValueError(
            f"--export must name a file of a folder that is there, got {path}; make {path.parent}"
        )
    parts = [_part(run, MOST_BYTES // len(runs)) for run in runs]
    page = exported_page({"runs": parts})
    try:
        with DiskSpaceGuard("--export", path.parent, "the page"):
            _replace(path, page)
    except PermissionError as error:
        raise ValueError(
            f"--export must name a file that may be written, got {path}: {error.strerror}; name another folder"
        ) from error
    samples = [f"{part['kept']} of {part['samples_of']}" for part in parts]
    return (
        f"{path}: {len(page.encode()) / 2**20:.1f} MiB, {len(runs)} runs, samples kept: {', '.join(samples)}"
    )


def _replace(path: Path, page: str) -> None:
    """Writes the whole file or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("x", encoding="utf-8") as file:  # with the mode from the umask
            file.write(page)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _part(run: RunData, most_bytes: int) -> Json:
    rows: dict[int, list[list[object]]] = {}
    serial, more = 0, True
    while more:
        answer = run.samples(serial)
        serial, more = int(str(answer["serial"])), bool(answer["more"])
        assert isinstance(answer["rows"], dict)
        rows |= answer["rows"]
    whole: dict[str, Json] = {}
    used = 0
    for rollout in sorted(rows, reverse=True):
        records = {f"{rollout}/{row[1]}": run.sample(rollout, int(str(row[1]))) for row in rows[rollout]}
        used += len(to_json(records))
        if used > most_bytes and whole:
            break
        whole |= records
    sample_rows = {
        rollout: found
        for rollout, found in rows.items()
        if all(f"{rollout}/{row[1]}" in whole for row in found)
    }
    return {
        "summary": run.summary(),
        "curves": run.curves(),
        "timeline": run.timeline(),
        "settings": run.settings(),
        "samples": {"columns": answer["columns"], "rows": sample_rows, "serial": serial, "more": False},
        "whole": whole,
        "kept": len(whole),
        "samples_of": sum(map(len, rows.values())),
    }
