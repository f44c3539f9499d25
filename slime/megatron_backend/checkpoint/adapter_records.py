"""The content of a checkpoint of a run with adapters: the trained parameters, and a record of the adapters.

The base is loaded from the checkpoint with which the run began.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime.checkpoints.checkpoint_dir import COMPLETE, existing
from slime.megatron_backend.checkpoint.checkpoint_io import explained_reading
from slime.megatron_backend.checkpoint.safe_reading import read_common
from slime.megatron_backend.checkpoint.torch_dist import is_foreign
from slime.megatron_backend.lora.install import find_lora
from slime.megatron_backend.model.gpt import HiddenGPTModel
from slime.megatron_backend.model.value_head import PARAMETER as VALUE_HEAD
from slime.models.lora import PREFIX as ADAPTERS
from slime.models.lora import Lora

_FLAGS = {
    "rank": "--lora-rank",
    "alpha": "--lora-alpha",
    "targets": "--target-modules",
    "excluded": "--exclude-modules",  # not in records of older versions
}


def filter_state(inner: HiddenGPTModel, state: dict[str, Any], adapters: bool) -> dict[str, Any]:
    """Returns the part of a model's state that a checkpoint holds. For a model with adapters, that is the trained part
    if `adapters`, and otherwise only the base."""
    if find_lora(inner) is None:
        return state
    return {k: v for k, v in state.items() if (k.startswith(ADAPTERS) or k == VALUE_HEAD) == adapters}


def make_base_record(inner: HiddenGPTModel) -> dict[str, Any] | None:
    """Returns the record of a checkpoint of adapters. Its `base` is the base's digest, or None if the base is not
    loaded or is in float16."""
    return None if (lora := find_lora(inner)) is None else {**asdict(lora), "base": inner.adapters.base}


def check_record(saved: dict[str, Any] | None, wanted: dict[str, Any] | None, path: Path) -> None:
    """Raises ValueError unless the checkpoint in `path` has the wanted adapters. None means whole weights."""
    if saved is not None and wanted is None:
        raise ValueError(
            f"a checkpoint must hold whole weights here, got adapters of rank {saved['rank']} in {path}; train on with "
            "--lora-rank, or write whole weights with `vime export --merge`"
        )
    if saved is None and wanted is not None:
        raise ValueError(
            f"--load must hold adapters with --lora-rank, got whole weights in {path}; add --finetune to start "
            "adapters over them, or leave --lora-rank out"
        )
    for name, flag in _FLAGS.items():
        if saved is not None and wanted is not None and (before := saved.get(name, ())) != wanted[name]:
            raise ValueError(
                f"{flag} must be {before} as in the checkpoint, got {wanted[name]} for {path}; a run resumes with "
                "the adapters that it began with"
            )
    if saved is None or wanted is None or None in (saved["base"], wanted["base"]):
        return
    if saved["base"] != wanted["base"]:
        raise ValueError(
            f"the base of adapters must be the weights that they were trained over, got others for {path}; give the "
            "--hf-checkpoint, --ref-load or --critic-load with which the run began"
        )


def stored_lora(
    directory: str | Path, iteration: int | None, *, choose: str = "--ckpt-step {}"
) -> Lora | None:
    """Returns the adapters of a checkpoint, or None for a checkpoint with whole weights and for a converted checkpoint.
    Raises ValueError for a damaged file, with `choose` as in `load_checkpoint`."""
    if iteration is None:
        return None
    path = existing(Path(directory), iteration)
    if not (path / COMPLETE).is_file() or is_foreign(path):
        return None  # reading the checkpoint reports the missing file
    with explained_reading(Path(directory), iteration, choose):
        saved = read_common(path).get("lora")
        return saved and Lora(
            *(saved["rank"], saved["alpha"], saved["dropout"]),
            *(tuple(saved[name]) for name in ("targets", "excluded") if name in saved),
        )
