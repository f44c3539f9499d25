"""The default `--rollout-function-path`: generates with the engine of `args.rollout_state`."""

from __future__ import annotations

from typing import Any

from slime.protocols import DataSource
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.evaluation import eval_rollout
from slime.rollout.rollout import generate_rollout_async
from slime.rollout.state import GenerateState


def generate_rollout(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One rollout of `--rollout-batch-size` groups, or, with `evaluation`, a pass over the evaluation datasets."""
    state: GenerateState = args.rollout_state
    if evaluation:
        return state.run(eval_rollout(state, rollout_id))
    return state.run(generate_rollout_async(state, rollout_id, data_source))
