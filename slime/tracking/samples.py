"""Some samples of each rollout, for people who look at a run: samples/ROLLOUT.jsonl in the run directory.

The first line of a file is {"version": 1, "rollout": 3, "kept": 8, "of": 64}. Each further line is a sample:

    {"index": 17, "group": 4, "prompt": "...", "response": "...", "label": "...", "reward": 1.0, "advantage": 0.7,
     "status": "completed", "versions": [2], "turns": 1, "metadata": {...},
     "tokens": [["The", 464, 1, -0.12, -0.13], ...]}

`tokens` are those of the response: text, id, loss mask, log-prob of the engine, log-prob of the trainer before the step
(nats; null if it is not known). `prompt` may be a list of chat messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SAMPLES = "samples"
VERSION = 1


class Token(NamedTuple):
    """One token of a response."""

    text: str
    id: int
    mask: int
    """1: the loss counts it."""
    engine: float | None
    """Its log-prob in nats when it was sampled."""
    trainer: float | None
    """Its log-prob of the trainer before the step."""


@dataclass
class SampleRecord:
    """One sample of a rollout, as the loss saw it."""

    index: int
    group: int
    prompt: str | list[dict[str, Any]]
    response: str
    label: Any
    reward: Any
    advantage: float | None
    """Mean over the tokens that the loss counts."""
    status: str
    versions: list[int]
    """Of the weights that produced it."""
    turns: int
    """Runs of tokens that the model produced; what is between them came from tools."""
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)


def sample_rollouts(run_dir: Path) -> list[int]:
    """The rollouts that have samples, in order."""
    names = (path.stem for path in (Path(run_dir) / SAMPLES).glob("*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_samples(run_dir: Path, rollout: int) -> Iterator[SampleRecord]:
    """The samples of a rollout. ValueError if it has none, or for a file of a newer version. A line that is cut is the
    last one."""
    path = Path(run_dir) / SAMPLES / f"{int(rollout)}.jsonl"
    if not path.is_file():
        raise ValueError(
            f"the rollout must have samples, got no {path}; --save-samples says how many a run keeps"
        )
    with path.open(encoding="utf-8") as lines:
        head = json.loads(next(lines, "{}"))
        if head.get("version", VERSION) > VERSION:
            raise ValueError(
                f"{path} must be of version {VERSION} or older, got {head['version']}; read it with a newer vime"
            )
        for line in lines:
            try:
                found = json.loads(line)
            except ValueError:
                return
            yield SampleRecord(**(found | {"tokens": [Token(*token) for token in found["tokens"]]}))


def write_samples(run_dir: Path, rollout: int, records: list[SampleRecord], of: int) -> Path:
    """Replace the file of a rollout. `of`: how many samples the rollout has."""
    folder = Path(run_dir) / SAMPLES
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{rollout}.jsonl"
    head = {"version": VERSION, "rollout": rollout, "kept": len(records), "of": of}
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for line in (head, *map(asdict, records)):
            file.write(json.dumps(line, default=str) + "\n")
    temporary.rename(path)
    return path
