"""Prints flags that adapt a one-node layout to a number of GPUs: scale_layout.py examples/MODEL/MODE.yaml GPUS

Colocated: all GPUs train and generate. Disaggregated: the larger half trains. If the number of GPUs is not a multiple
of a parallel size, the size becomes their greatest common divisor, with a note.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from slime.config.config_file import read_config_file
from slime.config.fields import spelled


def scaled(layout: Path, gpus: int) -> list[str]:
    """The flags that differ from the layout's flags."""
    given = {group.name: group.values for group in read_config_file(layout)}
    colocated = "colocate" in given
    trainers, engines = (gpus, gpus) if colocated else (gpus - gpus // 2, gpus // 2)
    flags = ["--actor-num-gpus-per-node", str(trainers), "--num-gpus-per-node", str(gpus)]
    if not colocated:
        flags += ["--rollout-num-gpus", str(engines)]
    for name, whole in (
        ("tensor_model_parallel_size", trainers),
        ("expert_model_parallel_size", trainers),
        ("rollout_num_gpus_per_engine", engines),
    ):
        size = int(given.get(name, ["1"])[0])
        fitting = math.gcd(size, whole)
        if fitting != size:
            flags += [spelled(name), str(fitting)]
            print(
                f"note: {spelled(name)} is {fitting} for {whole} GPUs, {layout} has {size}", file=sys.stderr
            )
        if name == "tensor_model_parallel_size" and fitting == 1 < size:
            flags.append("--no-sequence-parallel")
    return flags


if __name__ == "__main__":
    print(*scaled(Path(sys.argv[1]), int(sys.argv[2])))
