"""Flags that fit a layout of one node to a number of GPUs: scale_layout.py examples/MODEL/MODE.yaml GPUS

Colocated, all GPUs train and generate; disaggregated, the larger half trains. A tensor-parallel size that does not
divide the trainer's GPUs becomes 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slime.config.config_file import read_config_file


def scaled(layout: Path, gpus: int) -> list[str]:
    """The flags that differ from the layout's own."""
    given = {group.name: group.values for group in read_config_file(layout)}
    trainers = gpus if "colocate" in given else gpus - gpus // 2
    flags = ["--actor-num-gpus-per-node", str(trainers), "--num-gpus-per-node", str(gpus)]
    if "colocate" not in given:
        flags += ["--rollout-num-gpus", str(gpus // 2)]
    if trainers % int(given["tensor_model_parallel_size"][0]):
        flags += ["--tensor-model-parallel-size", "1", "--no-sequence-parallel"]
    return flags


if __name__ == "__main__":
    print(*scaled(Path(sys.argv[1]), int(sys.argv[2])))
