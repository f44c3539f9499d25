"""Data of make_model.py and make_tiny_model.py: prompts and lessons of two-digit addition, made from a seed.

    train.jsonl  .parquet    {"prompt": "12+34=", "label": "46"}: prompts of reinforcement learning
    test.jsonl   .parquet    the same, for pairs that are in no other file
    sft.jsonl                {"messages": [user, assistant]}: supervised warm-up on the pairs of train.jsonl

Some answers in sft.jsonl are slightly wrong (the share `slips`). A model that imitates them learns to add with errors,
and the reward then corrects the errors.
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
    """All ordered pairs of two-digit numbers, shuffled by `seed`: (train, test) with `test` held-out rows."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs]
    return rows[test:], rows[:test]


def write_jsonl(rows: list[dict], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sloppy_lessons(rows: list[dict[str, str]], seed: int, slips: float) -> list[dict]:
    """Chats in another random order. Each answer is wrong by 1, 2, 10 or 20 with probability `slips`."""
    teacher = random.Random(seed + 1)
    lessons = []
    for row in teacher.sample(rows, len(rows)):
        slip = teacher.choice(SLIPS) if teacher.random() < slips else 0
        question = {"role": "user", "content": row["prompt"]}
        answer = {"role": "assistant", "content": str(int(row["label"]) + slip)}
        lessons.append({"messages": [question, answer]})
    return lessons


def write_data(folder: Path, seed: int, test: int = 256, slips: float = 0.3) -> None:
    """Write the files above, with `test` held-out pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    train_rows, test_rows = additions(seed, test)
    for name, rows in (("train", train_rows), ("test", test_rows)):
        write_jsonl(rows, folder / f"{name}.jsonl")
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    write_jsonl(sloppy_lessons(train_rows, seed, slips), folder / "sft.jsonl")
