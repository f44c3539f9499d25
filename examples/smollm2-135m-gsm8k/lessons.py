"""Writes GSM8K's training rows as conversations for supervised fine-tuning: the question, and a short solution.

    python examples/smollm2-135m-gsm8k/lessons.py gsm8k/train.jsonl lessons.jsonl

GSM8K marks each calculation of a solution, as in "Natalia sold 48/2 = <<48/2=24>>24 clips". The answer of a lesson has
these calculations, one per line, and the final answer. It has 35 tokens on average; a whole solution has 125. Rows
whose last calculation does not result in the answer are left out.
"""

import json
import re
import sys
from pathlib import Path

CALCULATION = re.compile(r"<<([^<>]*)>>")


def lesson(row: dict[str, str]) -> dict[str, list[dict[str, str]]] | None:
    """Returns the conversation of a row, or None if the marked calculations do not result in the answer."""
    solution, _, answer = row["answer"].partition("#### ")
    steps = CALCULATION.findall(solution)
    answer = answer.strip().replace(",", "")
    if not steps or steps[-1].rpartition("=")[2].strip() != answer:
        return None
    turns = {"user": row["question"], "assistant": "\n".join([*steps, f"#### {answer}"])}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


def main(source: str, out: str) -> None:
    rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    lessons = [found for row in rows if (found := lesson(row))]
    Path(out).write_text("".join(json.dumps(each) + "\n" for each in lessons), encoding="utf-8")
    print(f"{out}: {len(lessons)} lessons from {len(rows)} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
