"""The record of a session in the metadata of its samples, and the metrics of such records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from slime.types import Sample

KEY = "session"
"""Key of the record in `Sample.metadata`."""


class SessionRecord(TypedDict):
    """The record of a whole session. Only the first sample of a session has it, so that nothing counts twice."""

    ended: str
    """Reason of the end: "done" if the agent ended the session, else the limit or the fault."""
    said: str
    """Text about the end that the agent got."""
    turns: int
    tool_calls: int
    samples: int
    """Number of samples. It is above 1 if the agent rewrote history or ran several conversations."""
    prefix_mismatch: int
    """Number of requests that repeated the history, but whose new messages were not found in the rendered template."""
    ignored: list[str]
    """Fields of requests that had no effect."""


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns metrics of the samples that come from sessions: means per session, the sum of prefix mismatches, and the
    share of sessions per reason of the end. The result is empty without a session."""
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
    """Returns the share of sessions without a trained token, and a text with the reasons, their shares and the most
    frequent message. Returns None without a session."""
    first = [sample for sample in samples if KEY in sample.metadata]
    if not first:
        return None
    failed: list[SessionRecord] = [s.metadata[KEY] for s in first if s.status is Sample.Status.FAILED]
    reasons = Counter(record["ended"] for record in failed).most_common()
    shares = ", ".join(f"{reason}: {count / len(first):.0%}" for reason, count in reasons)
    common = Counter(record["said"] for record in failed if record["said"]).most_common(1)
    return len(failed) / len(first), shares + "".join(f", said: {text}" for text, _ in common)
