"""Exports a checkpoint of any kind and parallel layout to a Hugging Face directory or a torch_dist folder, on one
rank."""

from __future__ import annotations

import ctypes
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from slime.checkpoints.checkpoint_dir import existing, latest, released
from slime.checkpoints.hf_config import MAPPED_BYTES
from slime.config import Config
from slime.config.sections.checkpoint import HfFormat
from slime.megatron_backend.checkpoint.adapter_records import stored_lora
from slime.megatron_backend.checkpoint.checkpoint_io import explained_reading
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, stored_parts
from slime.megatron_backend.checkpoint.merged import merged
from slime.megatron_backend.checkpoint.peft import save_peft
from slime.megatron_backend.checkpoint.safe_reading import MetadataReader
from slime.megatron_backend.checkpoint.torch_dist import StoredParts, load_torch_dist
from slime.megatron_backend.checkpoint.torch_dist_save import save_torch_dist
from slime.megatron_backend.checkpoint.weights import MAX_SHARD_BYTES, Read, live, load_hf, save_hf
from slime.megatron_backend.lora.base import note_base
from slime.megatron_backend.lora.install import add_adapters
from slime.megatron_backend.model.gpt import build_model, unwrapped
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import family_for
from slime.models.lora import Lora
from slime.models.vision import PREFIX as VISION

Kind = Literal["hf", "torch_dist"]
OUT, CHOOSE = "--output-dir", "vime export --iteration {}"
"""Flags in messages."""


def export_checkpoint(
    config: Config,
    iteration: int | None,
    out_dir: Path,
    to: Kind = "hf",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    merge: bool = False,
    form: HfFormat | None = None,
) -> str:
    """Writes the weights of a checkpoint to `out_dir`. Returns the name of the source: "checkpoint 4 of FOLDER".

    The checkpoint is `iteration` (None: the newest, or the release) in `config.load`, or `config.hf_checkpoint` if
    there is no `load`. Names, shapes and tokenizer come from `config.hf_checkpoint`, the checkpoint from which training
    started. `config` describes one rank. "hf" reads and writes parameter by parameter, so host memory is one file of
    `max_shard_bytes` and one tensor; "torch_dist" holds the whole model. For a checkpoint of adapters, the result is a
    PEFT directory, or, with `merge`, whole weights over those of `config.hf_checkpoint`. `form` is as in `save_hf`, for
    whole weights of "hf". Raises ValueError if the
    checkpoint does not exist or its shapes differ from config.json.
    """
    load, source = config.checkpoint.load, config.rollout.hf_checkpoint
    assert source is not None  # the command requires it
    if load is None:
        assert to != "hf"  # the command requires --load
    elif iteration is None:
        iteration = latest(load)
        if iteration is None and released(load) is None:
            raise ValueError(f"--load must hold a checkpoint, got none in {load}; check the path")
    hf_config = load_hf_config(source)
    quantization = hf_config.get("quantization_config")
    if form == "checkpoint" and quantization and family_for(hf_config).scheme(hf_config) is None:
        raise ValueError(
            f"--format must be bf16 for a checkpoint in {quantization.get('quant_method')}, got checkpoint; no code "
            "writes weights in this scheme"
        )
    with tempfile.TemporaryDirectory() as rendezvous:
        init_parallel(0, 1, config, init_method=f"file://{rendezvous}/store")
        try:
            lora = None if load is None else stored_lora(load, iteration, choose=CHOOSE)
            if merge and lora is None:
                raise ValueError(
                    f"--merge must be given for a checkpoint of adapters, got one of whole weights in {load}"
                )
            if lora is not None:
                _export_adapters(config, hf_config, lora, iteration, out_dir, to, merge, form)
                return f"adapters of checkpoint {iteration} of {load}"
            read = _export_weights(config, hf_config, iteration, out_dir, to, max_shard_bytes, form)
        finally:
            destroy_parallel()
    return read


def _export_weights(
    config: Config,
    hf_config: dict[str, Any],
    iteration: int | None,
    out_dir: Path,
    to: Kind,
    max_shard_bytes: int,
    form: HfFormat | None,
) -> str:
    """Exports whole weights. Returns the name of the source."""
    load, source = config.checkpoint.load, config.rollout.hf_checkpoint
    predicts, has_tower = (False, False) if load is None else trained_parts(load, iteration)
    model = build_model(hf_config, config, ddp=False, predicts=predicts, has_tower=has_tower)
    path = None if load is None or iteration is not None else released(load)
    read = source if load is None else str(path) if path else f"checkpoint {iteration} of {load}"
    if to == "hf":
        assert load is not None
        parts = (
            StoredParts(model, path)
            if path
            else stored_parts(load, model, iteration=iteration, choose=CHOOSE)
        )
        read_one = one_by_one(parts)
        save_hf(model, source, out_dir, max_shard_bytes=max_shard_bytes, flag=OUT, read=read_one, form=form)
    else:
        if load is None:
            load_hf(model, source)
        elif path:
            load_torch_dist(model, path)
        else:
            load_checkpoint(load, model, iteration=iteration, choose=CHOOSE)
        save_torch_dist(model, out_dir, source)
    return read


def _export_adapters(
    config: Config,
    hf_config: dict[str, Any],
    lora: Lora,
    iteration: int | None,
    out_dir: Path,
    to: Kind,
    merge: bool,
    form: HfFormat | None,
) -> None:
    """Exports only the adapters, or the whole model with them. The whole model must fit in memory."""
    if to != "hf":
        raise ValueError(
            f"--to must be hf for a checkpoint of adapters, got {to}; write whole weights with --merge first"
        )
    load, source = config.checkpoint.load, config.rollout.hf_checkpoint
    assert load is not None
    model = build_model(hf_config, config, ddp=False, adapt=partial(add_adapters, lora=lora, seed=0))
    if merge:
        load_hf(model, source)
        note_base(unwrapped(model))
    load_checkpoint(load, model, iteration=iteration, choose=CHOOSE, adapters=True)
    if not merge:
        if form is not None:
            raise ValueError(
                f"--format must be left out for a PEFT directory, got {form}; --merge writes whole weights"
            )
        save_peft(model, out_dir, source, flag=OUT)
        return
    save_hf(model, source, out_dir, flag=OUT, read=merged(model, live), form=form)


def trained_parts(directory: str | Path, iteration: int | None) -> tuple[bool, bool]:
    """Returns whether checkpoint `iteration` has layers of multi-token prediction, which --enable-mtp-training trained,
    and whether it has a vision tower, from a run with images. Both are false for a converted checkpoint."""
    if iteration is None:
        return False, False
    with explained_reading(Path(directory), iteration, CHOOSE):
        index = MetadataReader(existing(Path(directory), iteration)).read_metadata()
    predicts, sees = (
        any(name.startswith(prefix) for name in index.state_dict_metadata) for prefix in ("mtp.", VISION)
    )
    return predicts, sees


def one_by_one(parts: StoredParts) -> Read:
    """Returns a function that reads a parameter when it is written, and frees its memory at the next call. On a CPU,
    memory that was never written takes no space, so the whole model is never in memory."""
    before: list[Tensor] = []
    freed = 0

    def read(parameter: Tensor) -> Tensor:
        nonlocal freed
        for tensor in before:
            freed += tensor.nbytes
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        before[:] = [parameter]
        if freed > MAPPED_BYTES:
            freed = 0
            give_back_memory()
        return parts.take(parameter)

    return read


def give_back_memory() -> None:
    """Makes glibc return freed blocks below 32 MiB, such as a layer's experts, which it otherwise keeps."""
    ctypes.CDLL(None).malloc_trim(0)
