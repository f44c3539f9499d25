"""Writes lessons for a supervised warm-up that shows the tool to an untrained model.

    python examples/calculator-tool/lessons.py runs/tiny/train.jsonl runs/tiny/lessons.jsonl

Three lessons in ten call the calculator and repeat its result. The other lessons answer at once; the warm-up is too
short for the tiny model to learn such answers.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

CALLS = 0.3
"""Share of the lessons with a call."""


def call_text(expression: str) -> str:
    """Returns a call in the format of vLLM's parser `pythonic`. It is short, because a tiny model learns it faster."""
    return f'[calc(sum="{expression}")]'


def lesson(prompt: str, label: str, calls: bool) -> list[dict[str, Any]]:
    """Returns a conversation about a prompt such as "12+34="."""
    answer = {"role": "assistant", "content": label}
    question = {"role": "user", "content": prompt}
    if not calls:
        return [question, answer]
    call = {"role": "assistant", "content": call_text(prompt.rstrip("="))}
    return [question, call, {"role": "tool", "content": label}, answer]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path, help="JSON lines with `prompt` and `label`")
    parser.add_argument("lessons", type=Path, help="file to write")
    args = parser.parse_args()
    drawn = random.Random(0)
    rows = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    made = [{"messages": lesson(row["prompt"], row["label"], drawn.random() < CALLS)} for row in rows]
    args.lessons.write_text("".join(json.dumps(one) + "\n" for one in made), encoding="utf-8")


if __name__ == "__main__":
    main()
