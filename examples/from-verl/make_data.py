"""Writes word problems as a parquet file of verl: python make_data.py PROBLEMS.jsonl FILE.parquet"""

import json
import sys

import pandas as pd

INSTRUCTION = "Think step by step. Write the final number after ####."


def to_row(place, problem):
    solution = problem["answer"].split("####")[-1].strip().replace(",", "")
    return {
        "data_source": "words",
        "prompt": [{"role": "user", "content": f"{problem['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {"split": "train", "index": place, "digit_weight": 0.5},
    }


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = [to_row(place, json.loads(line)) for place, line in enumerate(file)]
    pd.DataFrame(rows).to_parquet(sys.argv[2])
