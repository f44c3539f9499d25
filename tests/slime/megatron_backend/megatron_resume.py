"""Writes a checkpoint of the trainer, which another megatron-core then continues.

    python megatron_resume.py ROOT FROM OUT     continues the checkpoint in FROM, and saves one in OUT

ROOT has the models of `trainer_cases.make_checkpoints`. OUT gets the weights after the third rollout: `continued`
from the checkpoint in FROM, and `saved` by a trainer that saved a checkpoint in OUT after the second rollout.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from trainer_cases import exported, make_config, train

from slime.megatron_backend.step.trainer import MegatronTrainer

FLAGS = {"lr_decay_style": "cosine", "min_lr": 0.01, "lr_warmup_iters": 1}


def saved(root: Path, out: Path) -> dict[str, Tensor]:
    """Trains two rollouts, saves a checkpoint in `out`, trains a third, and returns the weights."""
    return _weights(root, out / "store-saved", saves=out, save=str(out))


def continued(root: Path, source: Path) -> dict[str, Tensor]:
    """Returns the weights after a third rollout from the checkpoint in `source`."""
    return _weights(root, source / "store-continued", load=str(source))


def _weights(root: Path, store: Path, saves: Path | None = None, **flags: str) -> dict[str, Tensor]:
    store.parent.mkdir(exist_ok=True)
    config = make_config(root, weight_dir=str(store.parent / "weights"), **FLAGS, **flags)
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{store}")
    try:
        if saves is not None:
            train(trainer, 0, seed=1), train(trainer, 1, seed=2)
            trainer.save(1)
        else:
            assert trainer.start_rollout_id == 2
        train(trainer, 2, seed=3)
        return exported(trainer)
    finally:
        trainer.close()


if __name__ == "__main__":
    root, source, out = map(Path, sys.argv[1:])
    made = {"saved": saved(root, out), "continued": continued(root, source)}
    for name, weights in made.items():
        save_file(weights, out / f"{name}.safetensors")
