"""Checks the parts of a launch that a rehearsal cannot run: the plan with the launch's own flags, paths and ports."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from vime.doctor.finding import Finding, ok, problem, warning
from vime.rehearse.changes import Flags

PLAN_S = 120
PATHS = (
    "hf_checkpoint",
    "ref_load",
    "prompt_data",
    "eval_prompt_data",
    "critic_load",
    "opd_teacher_load",
    "custom_config_path",
)
FITS = "What would make it fit"
"""The section of a plan with the flags that help."""
TOO_SMALL = re.compile(r"does not fit|too small", re.IGNORECASE)


def check_cluster(
    flags: Flags,
    config: Mapping[str, object],
    rows: Path | None,
    folder: Path,
    base: Path,
    environ: Mapping[str, str],
    gpu: str,
) -> list[Finding]:
    """Plans the launch as written, with a folder that has only the model's config.json, and lists missing paths."""
    return [*_plan(flags, config, rows, folder, base, environ, gpu), *_paths(flags, base)]


def _plan(
    flags: Flags,
    config: Mapping[str, object],
    rows: Path | None,
    folder: Path,
    base: Path,
    environ: Mapping[str, str],
    gpu: str,
) -> list[Finding]:
    if flags.value("device") == "cpu":
        return [ok("plan", "the launch itself is for a CPU, so no GPU was planned")]
    asked = _ask(flags, config, rows, folder)
    sized = [] if flags.has("gpu") else ["--gpu", gpu]
    words = [sys.executable, "-P", "-m", "vime", "plan", *asked.argv, *sized]
    try:
        done = subprocess.run(
            words, cwd=base, env=dict(environ), capture_output=True, encoding="utf-8", timeout=PLAN_S
        )
    except subprocess.TimeoutExpired:
        return [warning("plan", f"not done after {PLAN_S} s", f"run it: {shlex.join(words[3:])}")]
    log = folder / "plan.log"
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode == 0:
        return [ok("plan", f"the flags fit {asked.value('gpu') or gpu}; the whole plan: {log}")]
    lines = [line.strip() for line in done.stdout.splitlines() if TOO_SMALL.search(line)]
    if not lines:
        return [problem("plan", "\n".join(done.stderr.strip().splitlines()[-8:]), "")]
    advice = re.search(rf"^{FITS}\n  (.*)", done.stdout, re.M)
    remedy = f"{advice[1]}; the whole plan: {log}" if advice else f"the whole plan: {log}"
    return [problem("plan", line, remedy if line is lines[-1] else "") for line in lines[-8:]]


def _ask(flags: Flags, config: Mapping[str, object], rows: Path | None, folder: Path) -> Flags:
    """Returns the launch's flags with a folder that has config.json and no weights, and with the rehearsal's rows."""
    asked = Flags(list(flags.groups))
    shape = folder / "shape"
    shape.mkdir(exist_ok=True)
    for file in (folder / "model").iterdir():  # its tokenizer
        if file.suffix != ".safetensors":
            shutil.copyfile(file, shape / file.name)
    (shape / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked.set("hf_checkpoint", "", shape)
    for name in ("ref_load", "load", "critic_load"):
        asked.drop(name, "")
    if flags.has("opd_teacher_load"):
        asked.set("opd_teacher_load", "", shape)
    for name in ("save", "run_dir"):
        if flags.has(name):
            asked.set(name, "", folder / "planned" / name)
    if rows is not None and rows.exists():
        asked.set("prompt_data", "", rows)
        if flags.has("num_epoch"):  # a few rows are less than an epoch
            asked.drop("num_epoch", "")
            asked.set("num_rollout", "", 1)
    asked.drop("eval_prompt_data", "")
    asked.drop("eval_interval", "")
    return asked


def _paths(flags: Flags, base: Path) -> list[Finding]:
    missing = []
    for name in PATHS:
        for word in flags.values(name) or []:
            path = word.partition("@[")[0]
            if "/" in path and not (base / path).exists():
                missing.append(f"--{name.replace('_', '-')} {path}")
    if not missing:
        return [ok("paths", "all files that the flags read are on this machine")]
    return [warning("paths", f"not on this machine: {', '.join(missing)}", "check them on the cluster")]
