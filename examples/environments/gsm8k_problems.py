"""GSM8K as an environment of `verifiers`: one answer per problem, graded by the environment's rubric."""

from __future__ import annotations

import json
import re
from typing import Any

import verifiers as vf
from datasets import Dataset

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right(completion: list[Any], answer: str, **_: object) -> float:
    """Returns 1.0 if the last number of the answer is the problem's result."""
    text = "".join(str(message["content"]) for message in completion if message["role"] == "assistant")
    found = NUMBER.findall(text)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(answer.replace(",", "")))


def load_environment(file: str, tasks: int = 7000) -> vf.Environment:
    """Returns the environment. `file` has one problem with "question" and "answer" per line, as GSM8K's JSON files."""
    with open(file, encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines][:tasks]
    rows = [
        {"question": p["question"], "answer": p["answer"].rpartition("####")[2].strip()} for p in problems
    ]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
