"""This module is the default `--rollout-function-path`. It generates with the engines of the run.

Plug-ins also import it: it has the names of slime's sglang_rollout, which are those of upstream vime's vllm_rollout.
"""

from __future__ import annotations

from argparse import Namespace

from slime.protocols import DataSource
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.evaluation import eval_rollout
from slime.rollout.generate import GenerateState, generate, generate_and_rm, generate_and_rm_group
from slime.rollout.request_abort import abort_calls
from slime.rollout.stream.stream import generate_rollout_async
from slime.types import SampleGroup

__all__ = [
    "GenerateState",
    "abort",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "get_model_url",
]


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Returns a rollout of `--rollout-batch-size` groups. With `evaluation`, runs all evaluation datasets instead."""
    own = GenerateState(args)
    if evaluation:
        return own.run(eval_rollout(own, rollout_id))
    return own.run(generate_rollout_async(own, rollout_id, data_source))


async def abort(args: Namespace, rollout_id: int) -> list[SampleGroup]:
    """Ends the running generations of this rollout. Each request returns the tokens generated so far.

    The returned list is empty, because the rollout itself puts groups back into the data source (--partial-rollout).
    """
    own = GenerateState(args)
    own.aborted = True
    abort_calls(own)
    if own.engine is not None:
        await own.engine.abort_all()
    return []


def get_model_url(args: Namespace, name: str, endpoint: str = "/generate") -> str:
    """Returns the URL of `endpoint` for the model `name`: at the name's router in `args.model_routers`, or, if the run
    serves a single model, at `args.router_url`. ValueError if the run serves several models and `name` is unknown."""
    routers: dict[str, str] = getattr(args, "model_routers", None) or {}
    if routers and name not in routers:
        raise ValueError(f"name must be one of {sorted(routers)}, got {name!r}; the run serves these models")
    return f"{routers.get(name, args.router_url)}{endpoint}"
