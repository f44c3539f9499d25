"""Checks that the launch's own folders can be written. The rehearsal itself writes into another folder."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from vime.doctor.finding import Finding, problem, warning
from vime.rehearse.changes import Flags

WRITTEN = re.compile(r"save|save_hf|critic_save|save_debug_(rollout|train)_data|.*_dir")
"""Flags with a folder or a file that the run writes."""


def check_folders(flags: Flags, base: Path) -> list[Finding]:
    """Returns the folders of the launch in which this user cannot write a file. Relative paths start at `base`.

    A file without a name is tried, because root may write despite the bits of a mode, and the kernel may refuse despite
    them. A folder may be absent on this machine and present on the cluster, so it is a problem only if its parent is
    here.
    """
    found = []
    for group in flags.groups:
        if not WRITTEN.fullmatch(group.name) or not group.values:
            continue
        path = base / group.values[0].partition("{")[0].rstrip("/")
        above = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
        try:
            with tempfile.TemporaryFile(dir=above):
                continue
        except OSError as error:
            name = f"--{group.name.replace('_', '-')}"
            text = f"{name} is in a folder in which this user cannot write: {path} ({error.strerror})"
            sure = above in (path, path.parent) or not above.is_dir()
            found.append((problem if sure else warning)("folders", text, "name another folder"))
    return found
