"""Checks the labels of the rows. A wrong column that exists makes every reward 0, without an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from vime.doctor.finding import Finding, problem, warning
from vime.rehearse.changes import Flags
from vime.rehearse.fitting import SFT

FEWEST = 4
"""Number of rows below which equal labels mean nothing."""
SHOWN = 60


def check_labels(flags: Flags, rows: Path) -> list[Finding]:
    """Returns a finding if all labels are equal, or are the prompts. It is a warning for a reward of the user, which
    may read other columns."""
    key = flags.value("label_key")
    if key is None or flags.value("loss_type") == SFT or flags.has("debug_train_only") or not rows.exists():
        return []
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    labels = [_read_column(line, key) for line in lines]
    prompts = [_read_column(line, flags.value("input_key") or "input") for line in lines]
    if len(lines) < FEWEST or None in labels or len(set(prompts)) == 1:
        return []
    if labels == prompts:
        what = "has the prompts"
    elif len(set(labels)) == 1:
        what = f"is {str(labels[0])[:SHOWN]} in each of the first {len(lines)} rows"
    else:
        return []
    judge = warning if flags.has("custom_rm_path") else problem
    text = f"--label-key {key} is not the column of the answers: it {what}"
    return [judge("label", text, "name another column")]


def _read_column(row: Mapping[str, object], key: str) -> str | None:
    """Returns a column, or field b of column a for the key a.b, as JSON. Returns None if it is absent or null."""
    value = row.get(key)
    if value is None:
        value = row
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
    return None if value is None else json.dumps(value, sort_keys=True)
