"""The Python API on the tiny model: the cells of the notebook, and a run that is stopped and resumed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_fixtures import PROMPTS, ROOT, SAMPLES, World, make_world, run

import vime

pytestmark = pytest.mark.e2e
KERNEL = """
import asyncio
import json

from transformers import AutoTokenizer

async def kernel():
    for source in json.load(open("cells.json")):
        exec(compile(source, "<cell>", "exec"), globals())

asyncio.run(kernel())
assert len(rewards) == 3 and rewards == [row["rollout/raw_reward"] for row in run.metrics], rewards
tokenizer = AutoTokenizer.from_pretrained(FLAGS["hf_checkpoint"])
for sample in run.samples:
    ids, right = [token.id for token in sample.tokens], sample.label
    text = tokenizer.decode(ids, skip_special_tokens=True)
    expected = sum(c.isdigit() for c in text) / max(1, len(text)) + 0.5 * (len(text) == len(right))
    assert sample.reward == expected, sample
assert run.state == "finished" and len({sample.reward for sample in run.samples}) > 1
"""


@pytest.mark.slow
def test_the_cells_of_the_notebook(tmp_path: Path) -> None:
    """The reward is a function of `__main__`, and an event loop is running, as in a notebook."""
    notebook = json.loads((ROOT / "examples/notebook/train.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    command = ["bash", "-c", f"cd {tmp_path} && exec $0 kernel.py", sys.executable]
    said = run(command, tmp_path / "output")
    assert "--num-rollouts is not a known flag; did you mean --num-rollout?" in said
    assert not (tmp_path / "runs/notebook/second").exists()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def odd(args: object, sample: object) -> float:
    return float(sample.tokens[-1] % 2)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_run_is_stopped_and_resumed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.root)
    flags = {
        **{"hf_checkpoint": world.model, "prompt_data": world.data / "train.jsonl", "input_key": "prompt"},
        **{"label_key": "label", "apply_chat_template": True, "device": "cpu", "colocate": True},
        **{"actor_num_gpus_per_node": 1, "rollout_batch_size": PROMPTS, "n_samples_per_prompt": SAMPLES},
        **{"rollout_max_response_len": 4, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 1024},
        **{"num_rollout": 400, "save": "ckpt", "load": "ckpt", "run_dir": "run"},
    }
    first = vime.train(flags, reward=odd, wait=False)
    assert first.state == "running"
    while len(first.metrics) < 2:
        time.sleep(0.1)
    first.stop()
    assert first.wait(120).state == "interrupted" and vime.Run("run").state == "interrupted"
    done = len(first.metrics)
    second = vime.train({**flags, "num_rollout": done + 1}, reward=odd)
    assert [row["rollout"] for row in second.metrics] == list(range(done + 1))
