"""Two-digit addition, prompts and lessons, from a seed alone: what make_model.py and make_tiny_model.py write as data.

    train.jsonl  .parquet    {"prompt": "12+34=", "label": "46"}: what reinforcement learning draws from
    test.jsonl   .parquet    the same for pairs that occur in no other file
    sft.jsonl                {"messages": [user, assistant]}: supervised warm-up on the pairs of train.jsonl

The teacher of sft.jsonl is sloppy: some of its answers (`slips`) are off by a little. A model that imitates it
learns how to add and also to be wrong, which the reward then corrects.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PAIRS = 90 * 90
SLIPS = (-20, -10, -2, -1, 1, 2, 10, 20)


def additions(seed: int, test: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All ordered pairs of two-digit numbers, shuffled by `seed`: (train, test) with `test` rows held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs]
    return rows[test:], rows[:test]


def write_jsonl(rows: list[dict], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sloppy_lessons(rows: list[dict[str, str]], seed: int, slips: float) -> list[dict]:
    """Chats in an order of their own; each answer is off by 1, 2, 10 or 20 with probability `slips`."""
    teacher = random.Random(seed + 1)
    lessons = []
    for row in teacher.sample(rows, len(rows)):
        slip = teacher.choice(SLIPS) if teacher.random() < slips else 0
        question = {"role": "user", "content": row["prompt"]}
        answer = {"role": "assistant", "content": str(int(row["label"]) + slip)}
        lessons.append({"messages": [question, answer]})
    return lessons


def write_data(folder: Path, seed: int, test: int = 256, slips: float = 0.3) -> None:
    """The files above, `test` of the pairs held out."""
    folder.mkdir(parents=True, exist_ok=True)
    train_rows, test_rows = additions(seed, test)
    for name, rows in (("train", train_rows), ("test", test_rows)):
        write_jsonl(rows, folder / f"{name}.jsonl")
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    write_jsonl(sloppy_lessons(train_rows, seed, slips), folder / "sft.jsonl")
