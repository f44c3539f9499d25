"""Compares the model of a run with transformers, if its model_type has no file in slime/models/families.

The comparison needs torch, which this process does not import. It runs in a child process on a CPU, for about ten
seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.models.llama_like import NEAREST, TENSORS, like_family
from slime.records.errors import FlagError

LIMIT = 1e-4
"""The largest accepted difference of a tiny model's logit in float32. Rounding alone gives about 1e-6."""
_MODULE = "slime.megatron_backend.like_check"
_SECONDS = 300.0


@dataclass(frozen=True)
class LikeResult:
    """The result of slime.megatron_backend.like_check."""

    tokens: int = 0
    difference: float | None = None
    """The largest difference of a logit, or None if the models could not be compared."""
    error: str = ""
    """The reason why the models could not be compared, or ""."""


def with_model_note(config: Config, *, compares: bool) -> Config:
    """Returns the configuration, with a note if its model_type has no family and its tensors are those of Llama.

    Raises ValueError if a tiny model's logits differ from those of transformers by more than `LIMIT`, or if the models
    cannot be compared. Without `compares`, this function compares no logits, and the note announces that a run does.
    """
    checkpoint = config.rollout.hf_checkpoint
    hf = read_hf_config(checkpoint)
    if TENSORS not in hf or like_family(hf) is None:
        return config
    kind = hf.get("model_type")
    note = f"model_type {kind} has no family: its tensors are those of Llama, and config.json describes its layers"
    if not compares:
        return _add(config, f"{note}; a run compares a tiny model with transformers before it starts")
    found = compare_like(checkpoint, trust_remote_code=config.train.trust_remote_code)
    difference = found.difference
    if difference is None or not difference <= LIMIT:
        what = (
            f"could not be compared with transformers: {found.error}"
            if difference is None
            else f"differs from transformers by {difference:.1e} in a logit, more than {LIMIT:.0e}"
        )
        raise FlagError(
            "model_type in config.json",
            "be that of a family, or of a model that computes what Llama's tensors compute",
            f"{kind!r}, whose tensors are most like those of {hf[TENSORS][NEAREST]}. A tiny model {what}",
            "docs/adding-a-model.md shows how to add a family",
        )
    return _add(
        config,
        f"{note}. Logits of {found.tokens} tokens of a tiny model differ from transformers' by at most "
        f"{difference:.1e} (limit {LIMIT:.0e})",
    )


def _add(config: Config, note: str) -> Config:
    return replace(config, notes=(*config.notes, note))


def compare_like(checkpoint: str, *, trust_remote_code: bool) -> LikeResult:
    """Runs slime.megatron_backend.like_check in a child process without GPUs, and returns its record."""
    command = [
        sys.executable,
        "-m",
        _MODULE,
        checkpoint,
        *(["--trust-remote-code"] if trust_remote_code else []),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return LikeResult(error=f"no result after {_SECONDS:.0f} s")
    try:
        return LikeResult(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        return LikeResult(error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
