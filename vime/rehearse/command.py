"""`vime rehearse`: runs a launch with a tiny model on this machine's CPU before it costs time on a cluster."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.records.errors import FlagError
from vime.pool.process import tail
from vime.rehearse.capture import CapturedLaunch, capture_launches, find_project
from vime.rehearse.changes import Flags
from vime.rehearse.cluster import check_cluster
from vime.rehearse.fitting import SFT, fit_flags
from vime.rehearse.folders import check_folders
from vime.rehearse.guess import guess_config
from vime.rehearse.hooks import FILTER, USERS
from vime.rehearse.labels import check_labels
from vime.rehearse.made import keep_made
from vime.rehearse.names import check_names
from vime.rehearse.page import format_page
from vime.rehearse.rows import take_rows
from vime.rehearse.runs import Outcome, rehearse_run
from vime.rehearse.shrink import shrink_config

VOCAB = 320
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.py",
    "*processor_config.json",
)
PAGE_FILE = "page.txt"
USAGE = """vime rehearse run.sh [ARGUMENTS OF THE SCRIPT]
vime rehearse --config mine.yaml
vime rehearse FLAGS OF vime train

A rehearsal takes the flags of a launch, makes a tiny model of the same family, and trains three rollouts on this
machine's CPU with the launch's own reward, hooks and data: it kills the run, resumes it, and checks the ledger. A
script runs with stand-ins for python, ray, pip and more, and cannot write outside the rehearsal's folder. The exit code
is 0 if nothing was found, and 1 if something would fail."""


def main(argv: Sequence[str]) -> int:
    """Returns 0 if nothing would fail, or 1. Raises ValueError for an input that cannot be rehearsed."""
    options, words = _parser().parse_known_args(list(argv))
    start = time.monotonic()
    if not words:
        raise FlagError("vime rehearse", "be given a script or flags", "nothing", "vime rehearse run.sh")
    folder = Path(options.out or tempfile.mkdtemp(prefix="vime-rehearse-")).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise FlagError("--out", "be a new or empty folder", folder, "name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    notes = list[str]()
    if words[0].startswith("-"):
        launch, title = CapturedLaunch(words, Path.cwd()), "the flags"
    else:
        launch, title = _take_launch(words, folder, options, notes), words[0]
    print(f"rehearsing {title} in {folder}", flush=True)
    outcome, page = rehearse(launch, title, folder, options, notes, start)
    (folder / PAGE_FILE).write_text(page + "\n", encoding="utf-8")
    print(page)
    return int(outcome.failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime rehearse",
        usage="vime rehearse [--out DIR] [--processes N] ... SCRIPT [ARGUMENTS] | FLAGS OF vime train",
        description=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", metavar="DIR", help="a new folder for everything (default: a temporary folder)"
    )
    parser.add_argument("--processes", type=int, default=2, help="most trainer processes here (default 2)")
    parser.add_argument(
        "--plan-gpu", default="h100", help="GPU of the cluster, for the memory plan (default h100)"
    )
    parser.add_argument(
        "--plan-gpus", type=int, default=8, help="GPUs that nvidia-smi shows the script (default 8)"
    )
    parser.add_argument(
        "--script-s", type=float, default=60.0, help="most seconds of the script (default 60)"
    )
    parser.add_argument("--deadline-s", type=float, default=300.0, help="most seconds in all (default 300)")
    return parser


def _take_launch(
    words: list[str], folder: Path, options: argparse.Namespace, notes: list[str]
) -> CapturedLaunch:
    with tempfile.TemporaryDirectory(prefix="vime-rehearse-script-") as sandbox:
        try:
            captured = capture_launches(
                Path(words[0]), words[1:], Path(sandbox), gpus=options.plan_gpus, deadline_s=options.script_s
            )
            project, layer = find_project(Path(words[0])), Path(sandbox) / "layer"
            launch, made = keep_made(captured.launches[-1], project, layer, folder / "made")
        finally:
            log = Path(sandbox) / "script.log"
            if log.exists():
                shutil.copyfile(log, folder / log.name)
    notes += captured.remarks
    if len(captured.launches) > 1:
        notes.append(f"the script starts {len(captured.launches)} trainings; this is the last one")
    if made:
        notes.append(f"made by the script: {', '.join(made)}")
    return launch


def rehearse(
    launch: CapturedLaunch,
    title: str,
    folder: Path,
    options: argparse.Namespace,
    notes: list[str],
    start: float,
) -> tuple[Outcome, str]:
    """Rehearses one training command. Returns what happened, and the page."""
    original = Flags.from_argv(_in_folder(launch))
    flags = Flags(list(original.groups))
    config, tokenizer = _read_model(original, launch.folder, notes)
    made = tokenizer is None
    layers = 2 * (2 if flags.number("pipeline_model_parallel_size", 1) > 1 else 1)
    model = folder / "model"
    _make_model(config, model, layers, tokenizer)
    notes.append(take_rows(flags, folder, launch.folder))
    fit_flags(flags, model, folder, processes=options.processes, made_tokenizer=made)
    text = config.get("text_config")
    if "linear_key_head_dim" in (text if isinstance(text, Mapping) else config):
        for name in ("fp32", "fp16"):
            flags.drop(name, "linear attention on a CPU needs bfloat16")
        flags.set("bf16", "linear attention on a CPU needs bfloat16")
    variables = dict(launch.variables)
    if flags.value("loss_type") != SFT and not flags.has("debug_train_only"):
        variables[USERS] = flags.value("dynamic_sampling_filter_path") or ""
        flags.set(
            FILTER_FLAG,
            "equal rewards of a random model are made to differ; then your filter decides",
            FILTER,
        )
    environ = {**os.environ, **launch.variables}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(launch.folder)]))
    outcome = rehearse_run(flags.argv, folder, launch.folder, variables, start + options.deadline_s)
    outcome.findings += check_cluster(
        original, config, folder / "rows.jsonl", folder, launch.folder, environ, options.plan_gpu
    )
    outcome.findings += [
        *check_labels(original, folder / "rows.jsonl"),
        *check_folders(original, launch.folder),
        *check_names(original, tokenizer, folder),
    ]
    page = format_page(title, outcome, flags.changes, notes, time.monotonic() - start)
    return outcome, page


FILTER_FLAG = "dynamic_sampling_filter_path"


def _in_folder(launch: CapturedLaunch) -> list[str]:
    """Returns the flags, with the paths of --config files seen from the folder of the launch."""
    words, config = list(launch.argv), False
    for i, word in enumerate(words):
        config = word == "--config" or (config and not word.startswith("--"))
        if config and word != "--config":
            words[i] = str(launch.folder / word)
    return words


def _read_model(flags: Flags, base: Path, notes: list[str]) -> tuple[Mapping[str, object], Path | None]:
    """Returns config.json of the launch's model, and its folder if that has a tokenizer."""
    name = flags.value("hf_checkpoint")
    if name is None:
        raise FlagError(
            "--hf-checkpoint", "be given", "none", "a folder with the model's config.json suffices"
        )
    folder = base / name
    if not (folder / "config.json").is_file():
        notes.append(f"{name} has no config.json here, so the model's flags describe the family")
        return guess_config(flags), None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if flags.has("multimodal_keys") and not any(folder.glob("p*processor_config.json")):
        raise FlagError(
            "--hf-checkpoint",
            "have the files of its processor and tokenizer here, because --multimodal-keys is given",
            name,
            "copy preprocessor_config.json, tokenizer.json and tokenizer_config.json to that path",
        )
    if not any(folder.glob("tokenizer*")):
        notes.append(f"{name} has no tokenizer here, so one with a token per byte was made")
        return config, None
    return config, folder


def _make_model(config: Mapping[str, object], model: Path, layers: int, tokenizer: Path | None) -> None:
    """Writes the tiny model. Another process does it, because this one imports no torch."""
    model.mkdir()
    if tokenizer is not None:
        for pattern in TOKENIZER_FILES:
            for file in tokenizer.glob(pattern):
                shutil.copyfile(file, model / file.name)
    tiny = shrink_config(config, layers, VOCAB if tokenizer is None else None)
    (model / "config.json").write_text(json.dumps(tiny, indent=1), encoding="utf-8")
    words = [sys.executable, "-P", "-m", "vime.rehearse.model", str(model)]
    log = model.parent / "model.log"
    with open(log, "wb") as output:
        done = subprocess.run(
            [*words, *(["--tokenizer"] if tokenizer is None else [])], stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        last = (tail(str(log), 1).strip() or "no output").partition(": ")[2]
        raise FlagError("the model", "be of a family that vime trains", last, f"look at {log}")
