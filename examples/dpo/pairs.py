"""Writes preference pairs from prompts with a label: the label alone is preferred to a sentence that contains it.

python examples/dpo/pairs.py PROMPTS.jsonl PAIRS.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(prompts: str, pairs: str) -> None:
    rows = [json.loads(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()]
    made = [
        {"prompt": row["prompt"], "chosen": row["label"], "rejected": f"It is {row['label']}."}
        for row in rows
    ]
    Path(pairs).write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
