"""A checkpoint of any kind and parallel layout -> a Hugging Face directory or a torch_dist folder, on one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from slime.checkpoint_dir import latest, released
from slime.config import Config
from slime.megatron_backend.checkpoint import load_checkpoint, trained_predictions
from slime.megatron_backend.model import build_model
from slime.megatron_backend.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.megatron_backend.torch_dist import load_torch_dist, save_torch_dist
from slime.megatron_backend.weights import load_hf, save_hf

Kind = Literal["hf", "torch_dist"]


def export_checkpoint(config: Config, iteration: int | None, out_dir: Path, to: Kind = "hf") -> str:
    """Write the weights of a checkpoint to `out_dir`. Returns what was read: "checkpoint 4 of FOLDER".

    The checkpoint is `iteration` (None: the newest, or the release) of `config.load`, or `config.hf_checkpoint` if
    there is no `load`. Names, shapes and tokenizer come from `config.hf_checkpoint`, the checkpoint that training
    started from. `config` describes one rank, which holds the whole model. ValueError if the checkpoint does not exist
    or its shapes differ from config.json.
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
    with tempfile.TemporaryDirectory() as rendezvous:
        init_parallel(0, 1, config, init_method=f"file://{rendezvous}/store")
        try:
            predicts = load is not None and trained_predictions(load, iteration)
            model = build_model(hf_config, config, ddp=False, predicts=predicts)
            if load is None:
                load_hf(model, source)
                read = source
            elif iteration is None:
                path = released(load)
                assert path is not None
                load_torch_dist(model, path)
                read = str(path)
            else:
                load_checkpoint(load, model, iteration=iteration, choose="vime export --iteration {}")
                read = f"checkpoint {iteration} of {load}"
            if to == "hf":
                save_hf(model, source, out_dir, flag="--output-dir")
            else:
                save_torch_dist(model, out_dir, source)
        finally:
            destroy_parallel()
    return read
