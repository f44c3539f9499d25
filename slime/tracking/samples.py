"""Writes and reads some samples of each rollout for users (--save-samples): samples/ROLLOUT.jsonl in the run directory.

The first line of a file is {"version": 1, "rollout": 3, "of": 64}. Each further line is a sample:

    {"place": 8, "index": 17, "group": 4, "group_size": 8, "prompt": "...", "response": "...", "label": "...",
     "reward": 1.0, "score": 1.0, "status": "completed", "versions": [2], "turns": 1, "metadata": {...},
     "tokens": [["The", 464, 1, -0.12, null], ...]}

`tokens` are those of the response: text, id, loss mask, log-prob of the engine in nats (null: unknown), and an empty
field for the trainer's log-prob. `group_size` counts the samples of the group in the rollout, and `score` is the number
of the reward, also for a reward that is a record. Older files lack these fields. `prompt` may be a list of chat
messages. `images` names files in samples/images with small copies of the prompt's images. `read` is the text that the
model read before the response, such as the rendered chat template or the messages of an agent. It is "" if the text
equals `prompt`. After the training of the rollout, a rank writes its values of its
own samples to samples/ROLLOUT.trainer-RANK.jsonl, one line each:

    {"place": 8, "advantage": 0.7, "log_probs": [-0.13, ...]}

`log_probs` belong to the policy before the rollout's updates. `read_samples` joins the two files.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from slime.protocols import ShownSample
from slime.system.disk_space import DiskSpaceGuard
from slime.tracking.run_files import (
    Line,
    is_number,
    is_whole_number,
    open_file,
    parse,
    read_lines,
    readable,
)
from slime.types import Message, Metadata, Reward, Sample, SampleGroup
from slime.vision.thumbnails import content_text, value_text, write_thumbnails

V = TypeVar("V")

SAMPLES, IMAGES = "samples", "images"
VERSION = 1
_SHOWN_CHARS = 2000
MOST_TOKENS = 8192
"""Number of first tokens of a response that a file has."""


class Token(NamedTuple):
    """One token of a response."""

    text: str
    id: int
    mask: int
    """1 if the loss counts the token."""
    engine: float | None
    """The engine's log-prob in nats when the token was sampled."""
    trainer: float | None
    """The trainer's log-prob before the step, in nats."""


@dataclass
class SampleRecord:
    """One sample of a rollout, as the loss uses it."""

    place: int
    """Index in the rollout."""
    index: int | None
    group: int | None
    prompt: str | list[Message]
    response: str
    label: object
    reward: Reward | None
    status: str
    versions: list[int]
    """Versions of the weights that sampled it."""
    turns: int
    """Number of runs of tokens that the model sampled. Tokens between these runs came from tools."""
    advantage: float | None = None
    """Mean over the tokens that the loss counts. None until the trainer has computed it."""
    metadata: Metadata = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    read: str = ""
    """Text of the tokens before the response, if it differs from `prompt`. A long text is cut at its end."""
    group_size: int | None = None
    """Number of the group's samples in the rollout. A file may have fewer. None in older files."""
    score: float | None = None
    """Number of the reward; for a record, its entry --reward-key. None if the reward has no number, and in older
    files."""
    images: list[str] = field(default_factory=list)
    """Files with small copies of the prompt's images."""


def shown_sample(groups: Sequence[SampleGroup]) -> ShownSample | None:
    """Returns the first sample of a rollout for the console."""
    sample = next((sample for group in groups for sample in group), None)
    if sample is None:
        return None
    prompt = question(sample.prompt)
    response, label = sample.response[:_SHOWN_CHARS], "" if sample.label is None else str(sample.label)
    return ShownSample(
        prompt[-_SHOWN_CHARS:],
        response,
        label[:_SHOWN_CHARS],
        f"{sample.reward}"[:_SHOWN_CHARS],
        sample.status.value,
    )


def question(prompt: str | list[Message]) -> str:
    """Returns a prompt for one line of a list. For a conversation, this is the last message that the model did not
    write.

    The conversations of SFT end with the response.
    """
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message.get("role") != "assistant"]
    return content_text((asked or [*prompt, {}])[-1].get("content"))


def sample_rollouts(run_dir: Path) -> list[int]:
    """Returns the rollouts that have samples, in order."""
    return sorted(rollout for rollout, rank in _files(run_dir) if rank is None)


def sample_files(run_dir: Path) -> dict[int, list[Path]]:
    """Returns the files by rollout, for rollouts that have samples: its own file, and the files of trainer ranks."""
    found = _files(run_dir)
    own = {rollout for rollout, rank in found if rank is None}
    files: dict[int, list[Path]] = {rollout: [] for rollout in sorted(own)}
    for (rollout, _), path in sorted(found.items(), key=lambda item: item[1]):
        if rollout in own:
            files[rollout].append(path)
    return files


def _files(run_dir: Path) -> dict[tuple[int, int | None], Path]:
    """Maps (rollout, trainer rank or None) to the file."""
    folder = Path(run_dir) / SAMPLES
    with readable(folder):
        paths = list(folder.glob("*.jsonl"))
    matches = [
        (path, re.fullmatch(r"([0-9]{1,15})(?:\.trainer-([0-9]{1,9}))?\.jsonl", path.name)) for path in paths
    ]
    return {(int(m[1]), None if m[2] is None else int(m[2])): path for path, m in matches if m is not None}


def read_samples(run_dir: Path, rollout: int, damaged: Counter[str] | None = None) -> Iterator[SampleRecord]:
    """Yields the samples of a rollout, with the trainer's values after its training.

    Lines that are not samples are left out, and counted in `damaged` by the name of their file. Raises ValueError if
    the rollout has no samples, for a file of a newer version, and for an unreadable one.
    """
    counts: Counter[str] = Counter() if damaged is None else damaged
    files = sample_files(run_dir).get(int(rollout))
    own = f"{SAMPLES}/{int(rollout)}.jsonl"
    if files is None:
        raise ValueError(
            f"the rollout must have samples, got no {Path(run_dir) / own}; --save-samples sets how many a run keeps"
        )
    trained: dict[int, Line] = {}
    for name in (f"{SAMPLES}/{path.name}" for path in files):
        if name != own:
            for line in _lines(run_dir, name, counts):
                if _is_trained(line):
                    trained[line["place"]] = line
                else:
                    counts[name] += 1
    lines = _lines(run_dir, own, counts)
    first = next(lines, {})
    version = first.get("version", VERSION)
    if not is_whole_number(version) or version > VERSION:
        raise ValueError(
            f"{Path(run_dir) / own} must be of version {VERSION} or older, got {str(version)[:80]}; read it with a "
            "newer vime"
        )
    for found in itertools.chain([first] if "tokens" in first else [], lines):  # the head may be damaged
        if _is_sample(found):
            yield _joined(found, trained.get(found["place"], {}))
        else:
            counts[own] += 1


def _joined(found: Line, known: Line) -> SampleRecord:
    log_probs = iter(known.get("log_probs") or ())
    tokens = [
        Token(text, id_, mask, engine, next(log_probs, None))
        for text, id_, mask, engine, _ in found["tokens"]
    ]
    values = {field.name: found[field.name] for field in fields(SampleRecord) if field.name in found}
    return SampleRecord(**(values | {"tokens": tokens, "advantage": known.get("advantage")}))


def _lines(run_dir: Path, name: str, damaged: Counter[str]) -> Iterator[Line]:
    """Yields the objects of a file. The last line may be incomplete while the file is being written."""
    file = open_file(run_dir, name)
    if file is None:
        return
    with file:
        for line in read_lines(file):
            if (found := parse(line)) is None:
                damaged[name] += 1
            else:
                yield found


def _is_sample(line: Line) -> bool:
    """Returns True if a line has the fields of a `SampleRecord` with the right types."""
    texts, whole = (line.get("response"), line.get("status")), (line.get("place"), line.get("turns"))
    numbered = (line.get("index"), line.get("group"), line.get("group_size"))
    score = line.get("score")
    tokens, versions, prompt = line.get("tokens"), line.get("versions"), line.get("prompt")
    return (
        all(isinstance(text, str) for text in texts)
        and all(map(is_whole_number, whole))
        and all(number is None or is_whole_number(number) for number in numbered)
        and (score is None or is_number(score))
        and (
            isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt))
        )
        and isinstance(versions, list)
        and all(map(is_whole_number, versions))
        and isinstance(line.get("metadata", {}), dict)
        and {"label", "reward"} <= line.keys()
        and isinstance(line.get("read", ""), str)
        and isinstance(line.get("images", []), list)
        and isinstance(tokens, list)
        and all(map(_is_token, tokens))
    )


def _is_token(token: object) -> bool:
    if not isinstance(token, list) or len(token) != 5:
        return False
    text, id_, mask, engine, _ = token
    is_counted = is_whole_number(id_) and is_whole_number(mask)
    return is_counted and isinstance(text, str) and (engine is None or is_number(engine))


def _is_trained(line: Line) -> bool:
    advantage, log_probs = line.get("advantage"), line.get("log_probs")
    return (
        is_whole_number(line.get("place"))
        and (advantage is None or is_number(advantage))
        and (
            log_probs is None
            or (isinstance(log_probs, list) and all(one is None or is_number(one) for one in log_probs))
        )
    )


def choose_samples(groups: Sequence[SampleGroup], spreads: Sequence[float], keep: int) -> list[int]:
    """Returns the indices in a rollout of at most `keep` samples in whole groups. `spreads` has the spread of each
    group's rewards.

    The group with the largest spread comes first, then the first group in which each sample has ended. Other groups
    follow, as far from each other as the rollout allows. If the first group has more than `keep` samples, its first
    `keep` samples stay.
    """
    begins = list(itertools.accumulate(map(len, groups), initial=0))
    kept: list[int] = []
    for number in _by_interest(groups, spreads, keep):
        begin, size = begins[number], len(groups[number])
        if not kept:
            size = min(size, keep)
        if len(kept) + size <= keep:
            kept += range(begin, begin + size)
    return sorted(kept)


def _by_interest(groups: Sequence[SampleGroup], spreads: Sequence[float], keep: int) -> Iterator[int]:
    """Returns the indices of the groups that have samples, in the order in which they are kept."""
    numbers = [number for number, group in enumerate(groups) if group]
    if not numbers:
        return iter(())
    widest = max(numbers, key=spreads.__getitem__)
    first = next((number for number in numbers if all(map(_has_ended, groups[number]))), numbers[0])
    count = keep // max(len(groups[number]) for number in numbers)
    spaced = numbers[:: max(1, len(numbers) // max(1, count))]
    return iter(
        dict.fromkeys([widest, first] if spreads[widest] else [first]) | dict.fromkeys([*spaced, *numbers])
    )


def _has_ended(sample: Sample) -> bool:
    return sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def write_samples(
    run_dir: Path,
    rollout: int,
    samples: Sequence[Sample],
    indices: Iterable[int],
    text_of: Callable[[int], str],
    decode: Callable[[list[int]], object] | None = None,
    *,
    reward_key: str | None = None,
) -> Path:
    """Writes the rollout's values of the samples at these indices.

    `text_of` returns the text of a token. `decode` returns the text of a prompt's tokens; without it, the tokens' texts
    are joined. `reward_key` is the entry of a reward that is a record.
    """
    head = {"version": VERSION, "rollout": rollout, "of": len(samples)}
    written = decode or (lambda ids: "".join(map(text_of, ids)))
    sizes = Counter(sample.group_index for sample in samples)
    records = [_record(i, samples[i], text_of, written) for i in indices if i < len(samples)]
    for record in records:
        record.images = write_thumbnails(run_dir / SAMPLES / IMAGES, samples[record.place].multimodal_inputs)
        record.group_size = None if record.group is None else sizes[record.group]
        record.score = read_reward_number(record.reward, reward_key)
    return _write(run_dir, f"{rollout}.jsonl", [head, *map(vars, records)])  # asdict would copy each token


def read_reward_number(reward: object, key: str | None) -> float | None:
    """Returns the number of a reward, or of its entry `key` if it is a record. Returns None if it is not a finite
    number."""
    found = reward.get(key) if isinstance(reward, dict) else reward
    found = found.item() if isinstance(found, np.generic) else found
    return float(found) if isinstance(found, bool) or is_number(found) else None


def write_trained(run_dir: Path, rollout: int, rank: int, lines: list[Line]) -> Path:
    """Writes a trainer rank's values of its kept samples: {"place", "advantage", "log_probs"}."""
    return _write(run_dir, f"{rollout}.trainer-{rank}.jsonl", lines)


def _write(run_dir: Path, name: str, lines: list[Line]) -> Path:
    folder = Path(run_dir) / SAMPLES
    path, temporary = folder / name, folder / f"{name}.tmp"
    with DiskSpaceGuard("--run-dir", run_dir, "samples of a rollout"):
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, default=_plain) + "\n")
        temporary.rename(path)
    return path


def _plain(value: object) -> object:
    """Converts a value that JSON cannot represent: a dataclass to a dictionary, others to text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return value_text(value)


def _record(
    index: int, sample: Sample, text_of: Callable[[int], str], decode: Callable[[list[int]], object]
) -> SampleRecord:
    length = min(sample.response_length, len(sample.tokens))
    read = str(decode(list(sample.tokens[: len(sample.tokens) - length][:MOST_TOKENS])))
    ids = sample.tokens[len(sample.tokens) - length :][:MOST_TOKENS]
    mask, engine = _per_token(sample.loss_mask, 1, length), _per_token(sample.rollout_log_probs, None, length)
    tokens = [
        Token(text_of(id_), id_, one, None if value is None else round(value, 6), None)
        for id_, one, value in zip(ids, mask[:MOST_TOKENS], engine[:MOST_TOKENS], strict=True)
    ]
    turns = sum(one and not before for before, one in zip([0, *mask], mask, strict=False))
    return SampleRecord(
        place=index,
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
        read="" if read == sample.prompt else read,
    )


def _per_token(values: Iterable[V] | None, unknown: V, length: int) -> list[V]:
    """Returns values per response token. A conversion hook may return a sample without values or with another number of
    values; the values are then unknown."""
    found = [] if values is None else list(values)
    return found if len(found) == length else [unknown] * length


def token_texts(decode: Callable[[list[int]], object]) -> Callable[[int], str]:
    """Returns a cached function from a token to its text. The cache works well, because a run uses few different
    tokens."""
    return functools.lru_cache(65536)(lambda id_: str(decode([id_])))
