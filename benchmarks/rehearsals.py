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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / part) for part in ("tests/vime/commands", "tests/slime", "tests/slime/vision", "scripts", ".")
]

from test_slime_launches import DATA, SCRIPTS, stand_ins  # noqa: E402

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
HOOKS = {
    "--custom-generate-function-path": "from slime.rollout.generate import generate as {name}\n",
    "--custom-rm-path": "async def {name}(args, sample, **kwargs):\n    return float(len(sample.response) % 2)\n",
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


def write_rows(rows: dict[str, Any]) -> None:
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, encoding="utf-8"
    ).strip()
    measured = {
        "rehearsed": sum(row["rehearsed"] for row in rows.values()),
        "scripts": len(rows),
        "of": len(SCRIPTS),
    }
    record = {
        "command": "python benchmarks/rehearsals.py --out DIR",
        "commit": commit,
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
            write_hook(root.joinpath("hooks", *modules).with_suffix(".py"), HOOKS[flag], function)
    start = time.monotonic()
    words = [sys.executable, "-P", "-m", "vime", "rehearse", "--out", str(root / "rehearsal"), *argv]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{root / 'hooks'}"}
    done = subprocess.run(words, cwd=root, env=env, capture_output=True, encoding="utf-8")
    page = done.stdout
    (root / "page.txt").write_text(page + done.stderr, encoding="utf-8")
    problems = re.search(r"^Would fail\n((?:  .*\n)*)", page, re.M)
    shown = problems[1] if problems else done.stderr[-600:]
    found = [line.strip() for line in shown.splitlines() if "nothing was found" not in line]
    row = {
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


def write_hook(file: Path, text: str, name: str) -> None:
    """Replaces a stand-in of the tests, which only has to exist, by a function that a run can call."""
    body = re.sub(rf"(async )?def {name}\(.*?return None\n", "", file.read_text(encoding="utf-8"), flags=re.S)
    renamed = text.replace("as {name}\n", f"as {name}\n") if "import" in text else text
    file.write_text(body + renamed.format(name=name), encoding="utf-8")


def complete_model(folder: Path, out: Path) -> None:
    """Adds what a published model has and the tests' config.json lacks: settings, name of the class, tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "text_config" in config or config.get("model_type") not in ARCHITECTURES:
        return
    arch = ARCHITECTURES[config["model_type"]]
    shape = out / "shapes" / arch
    if not shape.exists():
        words = [
            sys.executable,
            str(ROOT / "scripts/make_model.py"),
            "--arch",
            arch,
            "--no-weights",
            str(shape),
        ]
        subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    made = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    ids = {
        key: made.get(key)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "model_type")
    }
    rope = {key: made[key] for key in ("rope_parameters", "layer_types") if key in made}
    if "kv_lora_rank" in made:
        made |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if config["model_type"] == "minimax_m2":
        made |= {"scoring_func": "sigmoid", "use_routing_bias": True}
    merged = {**made, **config, **ids, **rope, "architectures": made["architectures"]}
    (folder / "config.json").write_text(json.dumps(merged), encoding="utf-8")
    for file in shape.glob("*token*"):
        if file.name != "generation_config.json":
            shutil.copyfile(file, folder / file.name)


if __name__ == "__main__":
    assert DATA
    main()
