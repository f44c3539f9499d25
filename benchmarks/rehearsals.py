"""Rehearses the launch scripts of slime one after the other, and writes benchmarks/results/rehearsals_cpu.json.

    python benchmarks/rehearsals.py --out DIR [--most-s 3000] [PATTERN]

The scripts are the flags of tests/vime/commands/slime_launches.toml. Models, data and hooks are not here: the
driver makes config.json and a tokenizer by scripts/make_model.py, rows as the tests do, and hooks that generate and
score as slime does. A second call continues: scripts in the record are left out, unless PATTERN names them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / part) for part in ("tests/vime/commands", "tests/slime", "tests/slime/vision", "scripts", ".")
]

from architectures import ARCHITECTURES as ROWS  # noqa: E402
from test_slime_launches import DATA, SCRIPTS, stand_ins  # noqa: E402
from vision_cases import TEMPLATE  # noqa: E402

RECORD = ROOT / "benchmarks/results/rehearsals_cpu.json"
ARCHITECTURES = {
    **{"qwen2": "qwen2.5-0.5b", "qwen3": "qwen3-4b", "qwen3_moe": "qwen3-30b-a3b", "llama": "llama-3.2-3b"},
    **{"qwen3_next": "qwen3-next-80b-a3b", "qwen3_5": "qwen3.5-9b", "qwen3_5_moe": "qwen3.5-35b-a3b"},
    **{
        "glm4": "glm-4-9b",
        "glm4_moe": "glm-4.5-355b",
        "glm4_moe_lite": "glm-4.7-flash",
        "glm_moe_dsa": "glm-5",
    },
    **{"kimi_k2": "kimi-k2-thinking", "deepseek_v3": "deepseek-v3", "minimax_m2": "minimax-m2"},
    **{"gpt_oss": "gpt-oss-20b", "mimo": "mimo-7b"},
}
"""Family -> the row of scripts/architectures.py whose tokenizer and further settings its scripts get."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOWERS = {"qwen3_vl": "qwen3-4b"}
"""The same for models with a vision tower."""
HOOKS = {
    "--custom-generate-function-path": "from slime.rollout.generate import generate as {name}\n",
    "--custom-rm-path": "async def {name}(args, sample, **kwargs):\n    return float(len(sample.response) % 2)\n",
    "--rollout-function-path": "from slime.rollout.vllm_rollout import generate_rollout as {name}\n",
    "--custom-tis-function-path": "from slime.algo.corrections import vanilla_tis_function as {name}\n",
}
SCORED = """from slime.rollout.generate import generate as _generate


async def {name}(args, sample, sampling_params):
    sample = await _generate(args, sample, sampling_params)
    sample.reward = float(len(sample.response) % 2)
    return sample
"""
"""A generate function that also returns the reward, for a script that names no reward function."""
DEADLINE_S = 900
"""Longest time of a rehearsal. Other work on the machine makes it longer than vime's own limit."""
MARKERS = {
    **{"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
    **{"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Rehearse slime's launch scripts.")
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--most-s", type=float, default=3000.0, help="no script starts after this many seconds"
    )
    args = parser.parse_args()
    start, rows = time.monotonic(), read_rows()
    for name, script in SCRIPTS.items():
        wanted = re.search(args.pattern, name) if args.pattern else name not in rows
        if wanted and time.monotonic() - start < args.most_s:
            rows[name] = rehearse(name, script, args.out)
            write_rows(rows)
            print(json.dumps({"name": name, **rows[name]})[:700], flush=True)


def read_rows() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))["scripts"] if RECORD.exists() else {}


def script_of(name: str) -> str:
    """Returns the script's path of a launch. A launch of upstream vime has the path of slime's script."""
    return name.removeprefix("upstream vime: ").split()[0]


def count_rehearsed(names: Iterable[str]) -> dict[str, int]:
    names = list(names)
    return {"launches": len(names), "scripts": len({script_of(name) for name in names})}


def write_rows(rows: dict[str, Any]) -> None:
    rows = {name: rows[name] for name in SCRIPTS if name in rows}
    for row in rows.values():
        row["problems"] = [re.sub(r"/\S+/site-packages/", "", line) for line in row["problems"]]
    seconds = [row["seconds"] for row in rows.values() if row["rehearsed"]]
    measured = {
        "rehearsed": count_rehearsed(name for name, row in rows.items() if row["rehearsed"]),
        "tried": count_rehearsed(rows),
        "of": count_rehearsed(SCRIPTS),
        "without_problem": sum(row["exit_code"] == 0 for row in rows.values()),
        "seconds_min_median_max": seconds and [min(seconds), median(seconds), max(seconds)],
    }
    record = {
        "command": "python benchmarks/rehearsals.py --out DIR",
        "hardware": "2 CPU cores, shared with other work: the seconds are no speed of vime",
        "measured": measured,
        "scripts": rows,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def rehearse(name: str, script: dict[str, Any], out: Path) -> dict[str, Any]:
    """Returns whether the three rollouts, the kill and the resume ran, and the problems of the page."""
    root = out / re.sub(r"\W+", "-", name)
    shutil.rmtree(root, ignore_errors=True)
    (root / "hooks").mkdir(parents=True)
    argv = stand_ins(script, root)
    for i, flag in enumerate(argv[:-1]):
        if flag == "--hf-checkpoint":
            complete_model(Path(argv[i + 1]), out)
        elif flag in HOOKS and not argv[i + 1].startswith("slime."):
            *modules, function = argv[i + 1].split(".")
            scores = "--rm-type" not in argv and "--custom-rm-path" not in argv
            text = SCORED if scores and flag == "--custom-generate-function-path" else HOOKS[flag]
            write_hook(root.joinpath("hooks", *modules).with_suffix(".py"), text, function)
    start = time.monotonic()
    commit = name_commit()
    given = ["--out", str(root / "rehearsal"), "--deadline-s", str(DEADLINE_S)]
    words = [sys.executable, "-P", "-m", "vime", "rehearse", *given, *argv]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{root / 'hooks'}"}
    done = subprocess.run(words, cwd=root, env=env, capture_output=True, encoding="utf-8")
    page = done.stdout
    (root / "page.txt").write_text(page + done.stderr, encoding="utf-8")
    problems = re.search(r"^Would fail\n((?:  .*\n)*)", page, re.M)
    shown = problems[1] if problems else done.stderr[-600:]
    found = [line.strip() for line in shown.splitlines() if "nothing was found" not in line]
    row = {
        "commit": commit,
        "family": script_family(script),
        "rehearsed": "resumed from the checkpoint" in page,
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "problems": [line.replace(str(root), "ROOT") for line in found][:12],
    }
    for folder in ("model", "checkpoint", "run"):
        shutil.rmtree(
            root / "rehearsal" / folder / ("" if folder != "run" else "logs/ray"), ignore_errors=True
        )
    return row


def name_commit() -> str:
    """Returns the commit of the code that runs, with a mark if tracked files other than records differ."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], encoding="utf-8").strip()
    names = [".", ":!benchmarks/results", ":!docs"]
    changed = subprocess.check_output([*git, "status", "--porcelain", "-uno", "--", *names], encoding="utf-8")
    return commit + "-dirty" * bool(changed.strip())


def write_hook(file: Path, text: str, name: str) -> None:
    """Replaces a stand-in of the tests, which only has to exist, by a function that a run can call."""
    body = re.sub(rf"(async )?def {name}\(.*?return None\n", "", file.read_text(encoding="utf-8"), flags=re.S)
    file.write_text(body + text.format(name=name), encoding="utf-8")


def script_family(script: dict[str, Any]) -> str | None:
    """Returns the model_type of the script's model, or None for a script without one."""
    config = DATA["configs"].get(script.get("config"))
    return (json.loads(config or "null") or {}).get("model_type")


def complete_model(folder: Path, out: Path) -> None:
    """Adds what a published model has and the tests' config.json lacks: settings, name of the class, tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family, text = config.get("model_type"), config.get("text_config")
    if family not in ARCHITECTURES | TOWERS:
        return
    shape = make_shape(TOWERS.get(family) or find_arch(config), out)
    made = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    for file in shape.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    if text:
        of_text = made.get("text_config", made)
        ids = {key: of_text.get(key) for key in IDS}
        left = ("rope_parameters", "rope_theta", *(() if has_layers(of_text, text) else ("layer_types",)))
        plain = {key: value for key, value in of_text.items() if key not in left}
        merged = {**config, "text_config": {**plain, **text, **ids}}
        name_markers(folder, config)
    else:
        merged = merge_settings(made, config)
    (folder / "config.json").write_text(json.dumps(merged), encoding="utf-8")


def find_arch(config: dict[str, Any]) -> str:
    """Returns the row of the same family, width and base of the rotation, or else the family's row."""
    family, wanted = config["model_type"], (config.get("hidden_size"), config.get("rope_theta"))
    rows = (
        name for name, row in ROWS.items() if row.family == family and (row.hidden, row.rope_theta) == wanted
    )
    return next(rows, ARCHITECTURES[family])


def make_shape(arch: str, out: Path) -> Path:
    """Returns a folder with config.json and tokenizer of a row of scripts/architectures.py."""
    shape = out / "shapes" / arch
    if not shape.exists():
        make = str(ROOT / "scripts/make_model.py")
        words = [sys.executable, make, "--arch", arch, "--no-weights", str(shape)]
        subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return shape


def merge_settings(made: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the tests' config.json, completed by those of the architecture."""
    ids = {key: made.get(key) for key in (*IDS, "vocab_size", "model_type")}
    if not has_layers(made, config):
        made.pop("layer_types", None)
    layers = {key: made[key] for key in ("layer_types",) if key in made}
    base = {key: config[key] for key in ("rope_theta",) if key in config}
    rope = {"rope_parameters": made["rope_parameters"] | base} if "rope_parameters" in made else {}
    if "kv_lora_rank" in made:
        made |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if config["model_type"] == "minimax_m2":
        made |= {"scoring_func": "sigmoid", "use_routing_bias": True}
    return {**made, **config, **ids, **layers, **rope, "architectures": made["architectures"]}


def has_layers(made: dict[str, Any], config: dict[str, Any]) -> bool:
    """Returns whether the list of layers of an architecture fits the depth of a config.json."""
    return len(made.get("layer_types") or []) == config["num_hidden_layers"]


def name_markers(folder: Path, config: dict[str, Any]) -> None:
    """Gives the ids of images and videos their names in the tokenizer, and a chat template that renders them."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    words = {number: word for word, number in vocab.items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for key, name in MARKERS.items():
        del vocab[words[config[key]]]
        vocab[name] = config[key]
        added.append({"id": config[key], "content": name, **plain})
    tokenizer["added_tokens"] = sorted(added, key=lambda token: token["id"])
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    settings["chat_template"] = TEMPLATE.replace("IMAGE", image).replace("VIDEO", video)
    settings["additional_special_tokens"] += list(MARKERS.values())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    main()
