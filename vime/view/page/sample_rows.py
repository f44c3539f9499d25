"""Reads the samples of a run for the page: one row of facts per sample, a whole sample, and a search in their texts.

Files of a rollout are read again when they change, because the trainer adds its part after the training.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from slime.tracking.samples import (
    IMAGES,
    SAMPLES,
    SampleRecord,
    question,
    read_reward_number,
    read_samples,
    sample_files,
    sample_rollouts,
)
from slime.types import Message
from slime.vision.thumbnails import content_text, read_thumbnail
from vime.view.page.cached import Stamp, stamp

COLUMNS = (
    *("rollout", "place", "group", "reward", "advantage", "tokens", "oldest", "newest", "turns", "status"),
    *("gap", "largest_gap", "prompt", "response", "group_size"),
)
"""Columns of a row. `oldest`, `newest`: versions of the weights. `gap`: |trainer - engine| in nats, the mean over the
trained tokens. `prompt` and `response`: the first characters; for a conversation, those of its last question."""
_SHOWN = 100
_SLICE_S = 0.25
"""Seconds for which one answer reads files. The answer contains the rollout where the next one continues."""

Cell = float | int | str | None
Row = list[Cell]


class SampleRows:
    """The rows of a run's samples. The class is not thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
        self._read: dict[int, tuple[Stamp, int, list[Row]]] = {}
        """Rollout -> its files, number of the reading, rows."""
        self._count = 0
        self.damaged: dict[int, int] = {}
        """Rollout -> number of unreadable lines among the lines read."""

    def since(self, serial: int) -> tuple[dict[int, list[Row]], int, bool]:
        """Returns rows by rollout read after reading number `serial`, the newest number, and True if more rollouts must
        be read.

        Raises ValueError for files that may not be read.
        """
        until = time.monotonic() + _SLICE_S
        more = False
        # The newest rollout comes first, because users look at its samples most.
        for rollout, files in reversed(sample_files(self._dir).items()):
            known = self._read.get(rollout)
            now = stamp(files)
            if known is not None and known[0] == now:
                continue
            if time.monotonic() > until:
                more = True
                break
            self._count += 1
            damaged = Counter[str]()
            rows = [_row(rollout, record) for record in read_samples(self._dir, rollout, damaged)]
            self.damaged[rollout] = damaged.total()
            self._read[rollout] = (now, self._count, rows)
        new = {rollout: rows for rollout, (_, number, rows) in self._read.items() if number > serial}
        return new, self._count, more

    def whole(self, rollout: int, place: int) -> dict[str, object]:
        """Returns a sample with its tokens. Raises ValueError if the sample does not exist."""
        for record in read_samples(self._dir, rollout):
            if record.place == place:
                return self._shown(record)
        raise _no_sample(rollout, place)

    def group(self, rollout: int, place: int) -> list[dict[str, object]]:
        """Returns the kept samples in the group of the sample at `place`, with their tokens. Raises ValueError if the
        sample does not exist."""
        records = list(read_samples(self._dir, rollout))
        asked = next((record for record in records if record.place == place), None)
        if asked is None:
            raise _no_sample(rollout, place)
        same = [one for one in records if one.group == asked.group] if asked.group is not None else [asked]
        return [self._shown(record) for record in same]

    def _shown(self, record: SampleRecord) -> dict[str, object]:
        """Returns a sample, with its images as data URLs if it has images."""
        shown = asdict(record)
        found = (read_thumbnail(self._dir / SAMPLES / IMAGES, str(name)) for name in shown.pop("images"))
        urls = [url for url in found if url is not None]
        return {**shown, "images": urls} if urls else shown

    def find(self, text: str, begin: int) -> tuple[list[list[int]], int | None]:
        """Searches prompts and responses for `text` in upper or lower case, from rollout `begin` on.

        Returns (rollout, place) per match, and the rollout where the next search continues, or None at the end.
        """
        until = time.monotonic() + _SLICE_S
        wanted, found = text.casefold(), list[list[int]]()
        for rollout in sample_rollouts(self._dir):
            if rollout < begin:
                continue
            if time.monotonic() > until:
                return found, rollout
            found += [
                [rollout, record.place]
                for record in read_samples(self._dir, rollout)
                if wanted in prompt_text(record.prompt).casefold() or wanted in record.response.casefold()
            ]
        return found, None


def _no_sample(rollout: int, place: int) -> ValueError:
    return ValueError(
        f"place must be the index of a stored sample of rollout {rollout}, got {place}; choose another"
    )


def prompt_text(prompt: str | list[Message]) -> str:
    """Returns a prompt as one text: the contents of its messages."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(content_text(message.get("content")) for message in prompt)


def _row(rollout: int, record: SampleRecord) -> Row:
    gaps = [
        abs(token.trainer - token.engine)
        for token in record.tokens
        if token.mask and token.trainer is not None and token.engine is not None
    ]
    return [
        *(rollout, record.place, record.group, _score(record), record.advantage, len(record.tokens)),
        *(
            min(record.versions, default=None),
            max(record.versions, default=None),
            record.turns,
            record.status,
        ),
        *(sum(gaps) / len(gaps) if gaps else None, max(gaps, default=None)),
        *(_shown(question(record.prompt)), _shown(record.response), record.group_size),
    ]


def _score(record: SampleRecord) -> float | None:
    """Returns the sample's score. A file of an older version has no `score`; then a reward that is a record has no
    number."""
    return read_reward_number(record.reward, None) if record.score is None else record.score


def _shown(text: str) -> str:
    line = " ".join(text[: 4 * _SHOWN].split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
