"""examples/vision-tiny learns, and looks at the pictures: the commands of its README."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkouts import ROOT, in_shell, linked_checkout

pytestmark = pytest.mark.e2e

MOST_DIFFERENCE = 1e-4
"""Bound on the mean |trainer - engine| of a step, in nats. Both compute in fp32, with the same pixels."""


@pytest.mark.slow
def test_the_reward_rises_and_falls_to_chance_with_other_pictures(tmp_path: Path) -> None:
    checkout = linked_checkout(tmp_path)
    page = (ROOT / "examples/vision-tiny/README.md").read_text()
    (commands,) = re.findall(r"^```bash[^\n]*\n(.*?)^```$", page, re.M | re.S)
    in_shell(commands, checkout)
    lines = (checkout / "runs/dots/grpo/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rewards = [record["rollout/raw_reward"] for record in records if "rollout/raw_reward" in record]
    assert rewards[0] < 0.1 and sum(rewards[-5:]) / 5 > 0.8
    dots, shuffled = (
        [r[f"eval/{name}"] for r in records if f"eval/{name}" in r] for name in ("dots", "shuffled")
    )
    assert dots[0] < 0.1 and dots[-1] > 0.8, "the reward on pictures that training did not have"
    assert shuffled[-1] < 0.5, "with pictures of other rows, at most chance is left"
    gaps = [
        r["train/train_rollout_logprob_abs_diff"]
        for r in records
        if "train/train_rollout_logprob_abs_diff" in r
    ]
    assert len(gaps) == 80 and max(gaps) < MOST_DIFFERENCE
    images = list((checkout / "runs/dots/grpo/samples/images").glob("*.png"))
    assert images, "vime ui shows the pictures of the samples"


def test_the_page_has_the_numbers_of_the_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/vision_tiny_cpu.json").read_text())["measured"]["eval"]
    page = (ROOT / "examples/vision-tiny/README.md").read_text()
    for name, row in (("dots", "`test.jsonl`"), ("shuffled", "`shuffled.jsonl`; guessing gives 0.33")):
        values = " | ".join(f"{record[step][name]:.2f}" for step in ("0", "40", "80"))
        assert f"| {row} | {values} |" in page
