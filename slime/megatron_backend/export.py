"""A checkpoint of any parallel layout -> a Hugging Face directory, on one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path

from slime.checkpoint_dir import latest
from slime.config import Config
from slime.megatron_backend.checkpoint import load_checkpoint
from slime.megatron_backend.model import build_model
from slime.megatron_backend.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.megatron_backend.weights import save_hf


def export_checkpoint(config: Config, iteration: int | None, out_dir: Path) -> int:
    """Write checkpoint `iteration` (None: the newest) of `config.load` to `out_dir`. Returns the iteration.

    Names, shapes and tokenizer come from `config.hf_checkpoint`, the checkpoint that training started from. `config`
    describes one rank. ValueError if the checkpoint does not exist or its shapes differ from config.json.
    """
    load, source = config.checkpoint.load, config.rollout.hf_checkpoint
    assert load is not None and source is not None  # the command requires both
    iteration = latest(load) if iteration is None else iteration
    if iteration is None:
        raise ValueError(f"--load must hold a checkpoint, got none in {load}; check the path")
    hf_config = load_hf_config(source)
    with tempfile.TemporaryDirectory() as rendezvous:
        init_parallel(0, 1, config, init_method=f"file://{rendezvous}/store")
        try:
            model = build_model(hf_config, config, ddp=False)
            load_checkpoint(load, model, iteration=iteration, choose="vime export --iteration {}")
            save_hf(model, source, out_dir, flag="--output-dir")
        finally:
            destroy_parallel()
    return iteration
