"""Tests the benchmark of images: equal prompts of both sides, the table by hand, and the processor time. It starts no
run."""

from __future__ import annotations

import json
from pathlib import Path

import image_cost
import pytest
from image_cost import IMAGE_TOKENS, ProcessorTime

from slime.data.tokenizer import load_tokenizer
from slime.models import read_decoder
from slime.plan.flops import ForwardFlops
from slime.plan.tower import tower_token_flops
from slime.vision.processor import MediaProcessor, load_processor


def test_both_sides_have_prompts_of_equal_length(tmp_path: Path) -> None:
    image_cost.make_model(tmp_path / "model")
    image_cost.write_prompts(tmp_path, 2)
    media = MediaProcessor(load_processor(str(tmp_path / "model")), tmp_path / "processed")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    rows = [
        [json.loads(line) for line in (tmp_path / f"{side}.jsonl").read_text().splitlines()]
        for side in ("images", "text")
    ]
    for picture, text in zip(*rows, strict=True):
        prompt = picture["prompt"].replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
        expanded, inputs = media.expand(prompt, [str(tmp_path / picture["image"])])
        assert inputs.items[0].tokens == IMAGE_TOKENS == 100
        assert len(tokenizer.encode(expanded)) == len(tokenizer.encode(text["prompt"]))
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    hf = {**fields["text_config"], **fields}
    vision = read_decoder(hf).vision
    assert vision is not None
    share = tower_token_flops(vision) / ForwardFlops(hf)(1, 0)
    assert share == pytest.approx(0.44, abs=0.005), "as the docstring of make_model has it"


def test_the_table_and_the_summary_by_hand() -> None:
    def run(side: str, cpu_s: float, wall: list[float], code: str = "now") -> dict[str, object]:
        parts = {"perf/train_time": [2.0 if side == "text" else 3.0], "perf/handover_count": [1.0]}
        more = {"peak_pss_gib": 4.0, "tokens": 200.0, "parts": parts}
        return {"side": side, "code": code, "cpu_s": cpu_s, "step_s": wall, **more}

    runs = [run("text", 10.0, [4.0]), run("images", 11.0, [5.0, 7.0]), run("images", 13.0, [6.0])]
    record = {"runs": [*runs, run("text", 10.0, [4.0], "before")], "rows": {"read text, first": 0.5}}
    lines = image_cost.table(record).splitlines()
    assert lines[1].split() == [
        "processor",
        "time",
        "of",
        "a",
        "step,",
        "s",
        "10.000",
        "12.000",
        "-",
        "1.20",
        "-",
    ]
    assert lines[2].split()[-5:] == ["4.000", "6.000", "-", "1.50", "-"]
    assert any(line.startswith("perf/train_time") and line.split()[-2] == "1.50" for line in lines)
    assert not any("handover_count" in line for line in lines)
    assert lines[-1] == "read text, first: 0.500 s"
    assert image_cost.summary(record) == {
        "now": {"processor_time_ratio": 1.2, "step_ratio": 1.5, "peak_memory_ratio": 1.0},
        "before": {},
    }


def test_processor_time_is_between_the_next_samples() -> None:
    used = ProcessorTime()
    used.samples = [(1.0, 10.0), (2.0, 11.0), (3.0, 14.0), (4.0, 20.0)]
    assert used.between(1.5, 3.5) == 9.0
