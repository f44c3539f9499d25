"""Writes random weights for a folder with config.json, for every family that the trainer supports.

    python -P -m vime.rehearse.model FOLDER [--tokenizer]

The trainer's own model is filled and exported, so the names and shapes of the tensors are those that a run loads.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from slime.checkpoints.hf_config import read_config_json, read_hf_config
from slime.checkpoints.hf_files import write_shards
from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.rules.resolve import resolve
from vime.testing.tiny_model import write_tokenizer

SPREAD = 0.05
MOST_BYTES = 2**30


def fill_parameter(name: str, parameter: torch.Tensor) -> None:
    """Fills a tensor with random values. A norm is near one, and a bias near zero."""
    parameter.normal_(std=SPREAD)
    if parameter.ndim == 1 and "norm" in name:
        parameter.add_(1.0)


def write_weights(folder: Path) -> None:
    """Writes the safetensors files of `folder`, in float32, as `config.json` describes them."""
    hf = read_hf_config(folder)
    has_tower = isinstance(read_config_json(folder).get("vision_config"), dict)
    config = resolve(
        {
            **{"hf_checkpoint": str(folder), "device": "cpu", "fp32": True, "actor_num_gpus_per_node": 1},
            **{"rollout_batch_size": 1, "n_samples_per_prompt": 2, "global_batch_size": 2, "num_rollout": 1},
            **{"rm_type": "zero", "run_dir": str(folder / "unused")},
        }
    )
    with tempfile.TemporaryDirectory() as store:
        init_parallel(0, 1, config, init_method=f"file://{store}/store")
        try:
            model = build_model(hf, config, ddp=False, has_tower=has_tower)
            with torch.no_grad():
                for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
                    if parameter.is_floating_point():
                        fill_parameter(name, parameter)
            write_shards(export_hf(model), folder, MOST_BYTES)
        finally:
            destroy_parallel()


def main(argv: list[str]) -> None:
    folder = Path(argv[0])
    if "--tokenizer" in argv:
        write_tokenizer(folder)
    torch.manual_seed(0)
    write_weights(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
