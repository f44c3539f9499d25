"""A reward function of verl: the number after "####", and a part for digits."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.search(r"####\s*(-?[\d.,]+)", solution_str)
    correct = found is not None and found.group(1).replace(",", "") == ground_truth
    digits = sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
    weight = extra_info["digit_weight"] if data_source == "words" else 0.0
    return {"score": float(correct) + weight * digits, "correct": correct, "digits": digits}
