"""Compares a run on images with a run on text of equal length: seconds per part of a step, and host memory.

    python benchmarks/image_cost.py --out benchmarks/results/image_cost_cpu.json
    python benchmarks/image_cost.py --rounds 1 --rollouts 3      a short trial
    python benchmarks/image_cost.py --before CHECKOUT            also runs the code of another checkout
    python benchmarks/image_cost.py --show image_cost_cpu.json   the table of a record

Both sides train the decoder of the same small Qwen3-VL on CPU cores, with a real vLLM engine. A rollout has 32 prompts
with 8 responses of equal length. A prompt of the side `images` has a picture of 100 tokens. A prompt of the side `text`
has a text of as many tokens instead, and its run has no vision tower. Each rollout has new pictures. The side `cached`
is the side `images` again, whose pictures an earlier run has processed. A rollout has two optimizer steps, so there is
a pass for old log-probs, and a KL term with a reference model.

The sides take turns. The first rollout of a run does not count. The processor time is that of all processes of a run,
sampled twice per second, from the end of the first step to the end of the last one. Memory is the sum of the
proportional set sizes of all processes, sampled once per second. `rows` has the times of reading the file of prompts
and of processing its pictures, in a separate process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import psutil
import torch
from operator_bench.machine import describe
from process_tree import descendants
from side_process import execute

from slime.config import Config

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples"
sys.path += [str(EXAMPLES / "vision-tiny"), str(EXAMPLES / "bench")]
from make import WORDS, write_file, write_processor  # noqa: E402

SIDES = ("images", "text", "cached")
PROMPTS, ANSWERS, RESPONSE, WARM_UP = 32, 8, 64, 1
SIDE, PATCH, MERGE = 320, 16, 2
"""Pixels per side of a picture and of a patch, and patches per side of a token."""
IMAGE_TOKENS = (SIDE // PATCH // MERGE) ** 2
VOCABULARY = 1024
QUESTION = "how many?"
LIMIT_S = 1200.0


def make_model(folder: Path) -> None:
    """Writes a Qwen3-VL of 1.4 million random parameters. Per token of an image, the tower needs 0.44 of the decoder's
    FLOPs. In Qwen3-VL-4B it needs 0.36."""
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    words = [*WORDS, *(f"w{number}" for number in range(VOCABULARY - len(WORDS)))]
    ids = {word: number for number, word in enumerate(words)}
    kinds = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    kinds |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    }
    text = {
        **{"vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 2},
        **{"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "rope_parameters": rope},
        **{"max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": ids["<|im_end|>"]},
        "pad_token_id": ids["<|endoftext|>"],
    }
    tower = {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 128, "num_heads": 1, "out_hidden_size": 192},
        **{"patch_size": PATCH, "num_position_embeddings": 1024, "deepstack_visual_indexes": [0]},
    }
    named = {f"{kind}_id": ids[word] for kind, word in kinds.items()}
    config = Qwen3VLConfig(
        text_config=text, vision_config=tower, tie_word_embeddings=True, dtype="float32", **named
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    write_processor(folder, ids)
    for name, changed in (
        (
            "preprocessor_config.json",
            {"patch_size": PATCH, "size": {"shortest_edge": 1, "longest_edge": SIDE**2}},
        ),
        ("tokenizer_config.json", {"model_max_length": 1024}),
    ):
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(settings | changed), encoding="utf-8")


def write_prompts(folder: Path, rows: int) -> None:
    """Draws a picture of noise per row, and writes the files of prompts of both sides."""
    (folder / "pictures").mkdir(parents=True)
    generator = random.Random(0)
    pictures, texts = [], []
    for number in range(rows):
        path = folder / "pictures" / f"{number}.png"
        small = PIL.Image.frombytes("RGB", (40, 40), generator.randbytes(40 * 40 * 3))
        small.resize((SIDE, SIDE)).save(path)
        pictures.append({"prompt": f"<image>{QUESTION}", "image": f"pictures/{number}.png", "label": "1"})
        # the tokens at the start and the end of a picture have one character each, too
        letters = "".join(generator.choices("abcdefgh", k=IMAGE_TOKENS + 2))
        texts.append({"prompt": f"{letters}{QUESTION}", "label": "1"})
    write_file(folder / "images.jsonl", pictures)
    write_file(folder / "text.jsonl", texts)


def flags(work: Path, side: str, rollouts: int) -> list[str]:
    """Returns the flags of a run."""
    rows = work / ("text.jsonl" if side == "text" else "images.jsonl")
    return [
        *("--device", "cpu", "--colocate", "--actor-num-gpus-per-node", "1", "--seed", "1"),
        *("--hf-checkpoint", str(work / "model"), "--prompt-data", str(rows), "--input-key", "prompt"),
        *("--label-key", "label", "--apply-chat-template", "--num-rollout", str(rollouts)),
        *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(ANSWERS)),
        *("--num-steps-per-rollout", "2", "--rollout-max-response-len", str(RESPONSE)),
        *("--custom-generate-function-path", "lengths.generate_longest"),
        *("--custom-rm-path", "untrained.odd_share", "--use-kl-loss", "--kl-loss-coef", "0.01"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192", "--lr", "1e-5"),
        *([] if side == "text" else ["--multimodal-keys", '{"image": "image"}']),
    ]


class ProcessorTime:
    """Samples the processor time of the descendants of this process, in a thread: (time, seconds) per sample."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> ProcessorTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        last: dict[int, float] = {}  # an ended process keeps its last sample
        while not self._stop.wait(0.5):
            for pid in descendants(os.getpid()):
                with suppress(psutil.NoSuchProcess):
                    times = psutil.Process(pid).cpu_times()
                    last[pid] = times.user + times.system
            self.samples.append((time.time(), sum(last.values())))

    def between(self, begin: float, end: float) -> float:
        """Returns the seconds between two times, from the next samples."""
        at = [next(seconds for now, seconds in self.samples if now >= moment) for moment in (begin, end)]
        return at[1] - at[0]


def measure(work: Path, side: str, number: int, rollouts: int, before: Path | None = None) -> dict[str, Any]:
    """Makes a run, with the code of the checkout `before` or of this one. Returns seconds per part of a step, one per
    counted rollout, the processor time per step, and the peak of memory."""
    checkout = before or REPOSITORY
    name = f"{side}-{number}{'-before' if before else ''}"
    run_dir, cache = work / name, work / f"cache-{number}{'-before' if before else ''}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir()
    command = [sys.executable, "-P", "-m", "vime", "train", *flags(work, side, rollouts)]
    environment = {
        **os.environ,
        **{"PYTHONPATH": f"{checkout}:{EXAMPLES / 'bench'}", "HF_HUB_OFFLINE": "1"},
        "HF_DATASETS_CACHE": str(cache),
    }
    with ProcessorTime() as used:
        ended = execute(
            *([*command, "--run-dir", str(run_dir)], run_dir / "output.log", environment, checkout),
            **{"progress": lambda seconds: None, "limit_s": LIMIT_S, "gpu": False},
        )
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [row for row in map(json.loads, lines) if "perf/step_time" in row]
    counted = found[WARM_UP:]
    parts = {name: [row[name] for row in counted] for name in counted[0] if name.startswith("perf/")}
    cpu_s = used.between(found[WARM_UP - 1]["time"], counted[-1]["time"])
    return {
        **{"code": "before" if before else "now", "cpu_s": cpu_s / len(counted)},
        **{"side": side, "round": number, "load": os.getloadavg()[0], "seconds": ended.end - ended.begin},
        "step_s": [
            after["time"] - before["time"] for before, after in itertools.pairwise(found[WARM_UP - 1 :])
        ],
        **{"peak_pss_gib": ended.peak_bytes / 2**30, "parts": parts},
        "tokens": statistics.mean(row["rollout/total_lengths"] for row in counted),
    }


def measure_rows(work: Path) -> dict[str, float]:
    """Returns the seconds of reading the files of prompts, and of processing all pictures, for an empty cache and for
    a filled one."""
    import datasets

    from slime.data.media.check import check_for
    from slime.data.prompts import load_prompts
    from slime.data.rows import RowColumns
    from slime.data.tokenizer import load_tokenizer
    from slime.vision.processor import MediaProcessor, load_processor

    datasets.config.HF_DATASETS_CACHE = work / "cache-rows"
    shutil.rmtree(work / "cache-rows", ignore_errors=True)
    config = Config.from_flat({"hf_checkpoint": str(work / "model"), "multimodal_keys": {"image": "image"}})
    tokenizer, check = load_tokenizer(str(work / "model")), check_for(config)
    media = MediaProcessor(load_processor(str(work / "model")))
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = function()
        seconds[name] = time.perf_counter() - began
        return result

    def read(side: str) -> Any:
        keys = {"image": "image"} if side == "images" else {}
        columns = RowColumns(
            input_key="prompt", label_key="label", apply_chat_template=True, multimodal_keys=keys
        )
        found = load_prompts(
            *(str(work / f"{side}.jsonl"), columns),
            **{"tokenizer": tokenizer, "max_prompt_len": 512, "media": check if keys else None},
        )
        return [found[i] for i in range(len(found))]

    for state in ("first", "cached"):
        timed(f"read text, {state}", lambda: read("text"))
        images = [prompt.images[0] for prompt in timed(f"read images, {state}", lambda: read("images"))]
        timed(f"process images, {state}", partial(list, map(partial(media.process, "image"), images)))
    return seconds


def table(record: Mapping[str, Any]) -> str:
    """Returns a table per checkout."""
    codes = dict.fromkeys(run["code"] for run in record["runs"])
    tables = (side_table(code, [run for run in record["runs"] if run["code"] == code]) for code in codes)
    return "\n".join([*tables, *(f"{name}: {value:.3f} s" for name, value in record["rows"].items())])


FIGURES: dict[str, Callable[[Mapping[str, Any]], list[float]]] = {
    "processor_time": lambda run: [run["cpu_s"]],
    "step": lambda run: run["step_s"],
    "peak_memory": lambda run: [run["peak_pss_gib"]],
}
"""The figures of a run whose ratio to text is in the record's summary."""


def summary(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the figures of images divided by those of text, per checkout. Empty for a checkout without both sides."""
    found: dict[str, dict[str, float]] = {}
    for code in dict.fromkeys(run["code"] for run in record["runs"]):
        found[code] = {}
        for name, values in FIGURES.items():
            middle = medians([run for run in record["runs"] if run["code"] == code], values)
            if middle.keys() >= {"text", "images"}:
                found[code][f"{name}_ratio"] = middle["images"] / middle["text"]
    return found


def medians(
    runs: Sequence[Mapping[str, Any]], values: Callable[[Mapping[str, Any]], list[float]]
) -> dict[str, float]:
    """Returns the median over runs and rollouts, by side."""
    of_sides = {side: [v for run in runs if run["side"] == side for v in values(run)] for side in SIDES}
    return {side: statistics.median(found) for side, found in of_sides.items() if found}


def side_table(code: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns medians per side, and their ratio to text."""
    lines = [f"{code:32} {'text':>9} {'images':>9} {'cached':>9} {'ratio':>6} {'cached':>6}"]

    def add(name: str, values: Callable[[Mapping[str, Any]], list[float]], form: str = ".3f") -> None:
        middle = medians(runs, values)
        shown = (
            f"{middle[side]:>9{form}}" if side in middle else f"{'-':>9}"
            for side in ("text", "images", "cached")
        )
        ratios = (
            f"{middle[side] / middle['text']:>6.2f}" if side in middle and middle.get("text") else f"{'-':>6}"
            for side in ("images", "cached")
        )
        lines.append(" ".join([f"{name:32}", *shown, *ratios]))

    add("processor time of a step, s", FIGURES["processor_time"])
    add("step, s", FIGURES["step"])
    add("peak of host memory, GiB", FIGURES["peak_memory"], ".2f")
    add("tokens per sample", lambda run: [run["tokens"]], ".1f")
    for part in runs[0]["parts"]:
        if part.endswith(("_time", "_tflops")):
            add(part, lambda run, part=part: run["parts"].get(part, []))
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--work", type=Path, default=Path("runs/image_cost"), help="replaced by each call")
    parser.add_argument("--before", type=Path, help="a checkout of older code, which runs too")
    parser.add_argument("--note", default="", help="what else ran on the machine, for the record")
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="print the table of a record, and run nothing"
    )
    arguments = parser.parse_args(argv)
    if arguments.show:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))))
        return 0
    work = arguments.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    make_model(work / "model")
    write_prompts(work, PROMPTS * arguments.rollouts)
    record = {
        "machine": describe(torch.device("cpu"), ["benchmarks/image_cost.py", *argv], None),
        **{"note": arguments.note, "rows": measure_rows(work), "runs": []},
    }
    for number in range(arguments.rounds):
        codes = [None, *filter(None, [arguments.before])]
        for side, code in itertools.product(arguments.sides, codes[:: 1 if number % 2 else -1]):
            record["runs"].append(measure(work, side, number, arguments.rollouts, code))
            made = record["runs"][-1]
            print(side, made["code"], f"{made['cpu_s']:.2f} s", json.dumps(made["step_s"]), flush=True)
            record["measured"] = summary(record)
            if arguments.out:
                arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
