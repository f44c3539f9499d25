"""The lengths of prompts and responses for which a layout is searched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LENGTHS = "--lengths"


@dataclass(frozen=True)
class Lengths:
    """A histogram: (prompt tokens, response tokens, share of the samples). The shares add up to 1."""

    bins: tuple[tuple[int, int, float], ...]
    source: str

    @property
    def mean_prompt(self) -> float:
        return sum(prompt * share for prompt, _, share in self.bins)

    @property
    def mean_response(self) -> float:
        return sum(response * share for _, response, share in self.bins)

    @property
    def longest(self) -> int:
        return max(prompt + response for prompt, response, _ in self.bins)

    def spread(self, samples: int) -> list[tuple[int, int]]:
        """Returns the (prompt, response) lengths of `samples` samples: every bin as often as its share, rounded."""
        found: list[tuple[int, int]] = []
        total = 0.0
        for prompt, response, share in self.bins:
            total += share * samples
            found += [(prompt, response)] * (round(total) - len(found))
        return found


def read_lengths(text: str | None, prompt: int, response: int) -> Lengths:
    """Returns the lengths of `--lengths`: PROMPT:RESPONSE[:WEIGHT],... or a run directory, or a file of JSON lines with
    prompt_tokens and response_tokens. Without `text`, every sample has `prompt` and `response` tokens.

    Raises ValueError for text without a length, or a run without samples.
    """
    if text is None:
        return Lengths(((prompt, response, 1.0),), "every response has the longest length; give --lengths")
    path = Path(text)
    if path.is_dir():
        rows = read_run(path)
        return _histogram(rows, f"{len(rows)} samples of {text}", text)
    if path.is_file():
        rows = _read_rows(path)
        return _histogram(rows, f"{len(rows)} rows of {text}", text)
    bins = [_parse(part) for part in text.split(",") if part]
    return _histogram(bins, f"{LENGTHS} {text}", text)


def read_run(folder: Path) -> list[tuple[int, int, float]]:
    """Returns the response lengths of the samples that a run kept, with the run's mean prompt length."""
    prompts = []
    for row in _json_lines(folder / "metrics.jsonl"):
        total, response = row.get("rollout/total_lengths"), row.get("rollout/response_len/mean")
        if isinstance(total, float | int) and isinstance(response, float | int):
            prompts.append(total - response)
    prompt = max(1, round(sum(prompts) / len(prompts))) if prompts else 1
    found: list[tuple[int, int, float]] = []
    for file in sorted(folder.glob("samples/*.jsonl")):
        for row in _json_lines(file):
            if isinstance(tokens := row.get("tokens"), list) and tokens:
                found.append((prompt, len(tokens), 1.0))
    return found


def _parse(part: str) -> tuple[int, int, float]:
    words = part.split(":")
    try:
        prompt, response = int(words[0]), int(words[1])
        weight = float(words[2]) if len(words) == 3 else 1.0
        if len(words) > 3 or prompt < 1 or response < 1 or weight <= 0:
            raise ValueError
    except (ValueError, IndexError):
        raise ValueError(
            f"{LENGTHS} must be PROMPT:RESPONSE[:WEIGHT],... with numbers above 0, a run directory or a file of JSON "
            f"lines, got {part}; for example 200:1000:3,200:8000:1"
        ) from None
    return prompt, response, weight


def _read_rows(file: Path) -> list[tuple[int, int, float]]:
    rows = []
    for row in _json_lines(file):
        prompt, response = row.get("prompt_tokens"), row.get("response_tokens")
        if isinstance(prompt, int) and isinstance(response, int) and prompt > 0 and response > 0:
            rows.append((prompt, response, 1.0))
    return rows


def _json_lines(file: Path) -> Iterator[dict[str, object]]:
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line) if line.strip() else None
        if isinstance(row, dict):
            yield row


def _histogram(bins: Sequence[tuple[int, int, float]], source: str, text: str, most: int = 64) -> Lengths:
    """Joins samples into at most `most` bins of equal share, sorted by the response."""
    if not bins:
        raise ValueError(
            f"{LENGTHS} must have lengths, got none in {text or 'an empty text'}; give PROMPT:RESPONSE, or a run whose "
            "samples were kept"
        )
    ordered = sorted(bins, key=lambda row: (row[1], row[0]))
    total = sum(weight for *_, weight in ordered)
    size = max(1, -(-len(ordered) // most))
    joined = []
    for i in range(0, len(ordered), size):
        part = ordered[i : i + size]
        weight = sum(w for *_, w in part)
        means = [round(sum(row[n] * row[2] for row in part) / weight) for n in (0, 1)]
        joined.append((means[0], means[1], weight / total))
    return Lengths(tuple(joined), source)
