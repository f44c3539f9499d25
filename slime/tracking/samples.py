"""Some samples of each rollout, for people who look at a run (--save-samples): samples/ROLLOUT.jsonl in its directory.

The first line of a file is {"version": 1, "rollout": 3, "of": 64}. Each further line is a sample:

    {"place": 8, "index": 17, "group": 4, "prompt": "...", "response": "...", "label": "...", "reward": 1.0,
     "status": "completed", "versions": [2], "turns": 1, "metadata": {...},
     "tokens": [["The", 464, 1, -0.12, null], ...]}

`tokens` are those of the response: text, id, loss mask, log-prob of the engine in nats (null: not known), and a place
for the trainer's. `prompt` may be a list of chat messages. After the training of the rollout, a rank writes what it
knows of its own samples to samples/ROLLOUT.trainer-RANK.jsonl, one line each:

    {"place": 8, "advantage": 0.7, "log_probs": [-0.13, ...]}

`log_probs` are of the policy before the rollout's updates. `read_samples` puts the two together.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from slime.disk_space import Room
from slime.tracking.journal import Line
from slime.types import Message, Metadata, Reward, Sample

SAMPLES = "samples"
VERSION = 1
MOST_TOKENS = 8192
"""Tokens of a response that a file has: the first ones."""


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

    place: int
    """In the rollout."""
    index: int | None
    group: int | None
    prompt: str | list[Message]
    response: str
    label: object
    reward: Reward | None
    status: str
    versions: list[int]
    """Of the weights that produced it."""
    turns: int
    """Runs of tokens that the model produced; what is between them came from tools."""
    advantage: float | None = None
    """Mean over the tokens that the loss counts; None before the trainer has it."""
    metadata: Metadata = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)


def sample_rollouts(run_dir: Path) -> list[int]:
    """The rollouts that have samples, in order."""
    names = (path.stem for path in (Path(run_dir) / SAMPLES).glob("*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_samples(run_dir: Path, rollout: int) -> Iterator[SampleRecord]:
    """The samples of a rollout, with what the trainer knows of them after its training. A line that is cut is the last.

    ValueError if there are none, for a file of a newer version, and for one that may not be read.
    """
    path = Path(run_dir) / SAMPLES / f"{int(rollout)}.jsonl"
    if not path.is_file():
        raise ValueError(
            f"the rollout must have samples, got no {path}; --save-samples says how many a run keeps"
        )
    trained: dict[int, Line] = {}
    for part in path.parent.glob(f"{int(rollout)}.trainer-*.jsonl"):
        trained |= {line["place"]: line for line in _lines(part)}
    lines = _lines(path)
    if (version := next(lines, {}).get("version", VERSION)) > VERSION:
        raise ValueError(
            f"{path} must be of version {VERSION} or older, got {version}; read it with a newer vime"
        )
    for found in lines:
        known = trained.get(found["place"], {})
        log_probs = iter(known.get("log_probs") or ())
        tokens = [
            Token(text, id_, mask, engine, next(log_probs, None))
            for text, id_, mask, engine, _ in found["tokens"]
        ]
        yield SampleRecord(**(found | {"tokens": tokens, "advantage": known.get("advantage")}))


def _lines(path: Path) -> Iterator[Line]:
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    yield json.loads(line)
                except ValueError:
                    return
    except PermissionError as error:
        raise ValueError(
            f"RUN_DIR must be a run that this user can read, got no permission for {path}; ask its owner"
        ) from error


def kept_places(rollout_samples: int, keep: int) -> range:
    """The places of the samples in a rollout that are kept: `keep` ones, as far apart as `rollout_samples` allow."""
    stride = max(1, rollout_samples // max(1, keep))
    return range(0, stride * keep, stride)


def write_samples(
    run_dir: Path,
    rollout: int,
    samples: Sequence[Sample],
    places: range,
    text_of: Callable[[int], str],
) -> Path:
    """Write what the rollout knows of the samples at these places. `text_of`: of a token."""
    head = {"version": VERSION, "rollout": rollout, "of": len(samples)}
    records = [_record(place, samples[place], text_of) for place in places if place < len(samples)]
    return _write(run_dir, f"{rollout}.jsonl", [head, *map(asdict, records)])


def write_trained(run_dir: Path, rollout: int, rank: int, lines: list[Line]) -> Path:
    """Write what a trainer rank knows of its samples that are kept: {"place", "advantage", "log_probs"}."""
    return _write(run_dir, f"{rollout}.trainer-{rank}.jsonl", lines)


def _write(run_dir: Path, name: str, lines: list[Line]) -> Path:
    folder = Path(run_dir) / SAMPLES
    path, temporary = folder / name, folder / f"{name}.tmp"
    with Room("--run-dir", run_dir, "samples of a rollout"):
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, default=str) + "\n")
        temporary.rename(path)
    return path


def _record(place: int, sample: Sample, text_of: Callable[[int], str]) -> SampleRecord:
    length = sample.response_length
    ids = sample.tokens[len(sample.tokens) - length :][:MOST_TOKENS]
    mask = list(sample.loss_mask or [1] * length)
    unknown: list[float | None] = [None] * length
    engine = list(sample.rollout_log_probs) if sample.rollout_log_probs else unknown
    tokens = [
        Token(text_of(id_), id_, one, None if value is None else round(value, 6), None)
        for id_, one, value in zip(ids, mask[:MOST_TOKENS], engine[:MOST_TOKENS], strict=True)
    ]
    turns = sum(one and not before for before, one in zip([0, *mask], mask, strict=False))
    return SampleRecord(
        place=place,
        index=sample.index,
        group=sample.group_index,
        prompt=sample.prompt,
        response=sample.response,
        label=sample.label,
        reward=sample.reward,
        status=sample.status.value,
        versions=list(sample.weight_versions),
        turns=turns,
        metadata=sample.metadata,
        tokens=tokens,
    )


def token_texts(decode: Callable[[list[int]], object]) -> Callable[[int], str]:
    """The text of a token, remembered: the tokens of a run are few."""
    return functools.lru_cache(65536)(lambda id_: str(decode([id_])))
