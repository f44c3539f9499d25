"""What a session says about itself in the metadata of its samples, and the metrics of that."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from slime.types import Sample

KEY = "session"
"""In `Sample.metadata`."""


class SessionRecord(TypedDict):
    """Of a whole session. Only its first sample has one, so nothing counts twice."""

    ended: str
    """Why: "done" by the agent itself, else the limit or the fault."""
    said: str
    """What the agent was told about it."""
    turns: int
    tool_calls: int
    samples: int
    """More than one where the agent rewrote history or ran several conversations."""
    prefix_mismatch: int
    """Requests that repeated the history, but whose new messages could not be found in the rendered template."""
    ignored: list[str]
    """Fields of requests that had no effect."""


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of the samples that come from sessions: means per session, the sum of prefix mismatches, and the share of
    sessions by why they ended. Empty without a session."""
    records: list[SessionRecord] = [s.metadata[KEY] for s in samples if KEY in s.metadata]
    if not records:
        return {}
    found = {
        "session/turns": statistics.fmean(record["turns"] for record in records),
        "session/tool_calls": statistics.fmean(record["tool_calls"] for record in records),
        "session/samples": statistics.fmean(record["samples"] for record in records),
        "session/prefix_mismatch": float(sum(record["prefix_mismatch"] for record in records)),
    }
    reasons = Counter(record["ended"] for record in records)
    return found | {f"session/ended_{why}": n / len(records) for why, n in sorted(reasons.items())}


def failures(samples: Sequence[Sample]) -> tuple[float, str] | None:
    """The share of sessions that nothing is trained on, and why: their reasons with shares, and the most frequent text.
    None without a session."""
    first = [sample for sample in samples if KEY in sample.metadata]
    if not first:
        return None
    failed: list[SessionRecord] = [s.metadata[KEY] for s in first if s.status is Sample.Status.FAILED]
    reasons = Counter(record["ended"] for record in failed).most_common()
    shares = ", ".join(f"{reason}: {count / len(first):.0%}" for reason, count in reasons)
    said = Counter(record["said"] for record in failed if record["said"]).most_common(1)
    return len(failed) / len(first), shares + "".join(f", said: {text}" for text, _ in said)
