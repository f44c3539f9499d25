"""Trains on saved rollouts while the engines run (`--load-forge-rollout-data`), to measure memory.

`--load-debug-rollout-data` starts no engines. This function leaves engines and weight updates as they are.
"""

from __future__ import annotations

from argparse import Namespace

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.debug_data import load_debug_rollout_data


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: object, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The groups that `--save-debug-rollout-data` wrote; an evaluation has none.

    A path without {rollout_id} is read in every rollout. ValueError without the flag or without the file.
    """
    template = args.load_forge_rollout_data
    if not template:
        raise ValueError(
            "--load-forge-rollout-data must be given with slime.rollout.forge_load.generate_rollout, got none; name a "
            "file of --save-debug-rollout-data"
        )
    if evaluation:
        return RolloutFnEvalOutput({})
    return RolloutFnTrainOutput(load_debug_rollout_data(template, rollout_id))
