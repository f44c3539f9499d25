"""This module is the default `--rollout-function-path`. It generates with the engines of the run.

Plug-ins also import it: it has the names of slime's sglang_rollout, which are those of upstream vime's vllm_rollout.
"""

from __future__ import annotations

from argparse import Namespace

from slime.protocols import DataSource
from slime.rollout import evaluation
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.generate import GenerateState, generate, generate_and_rm, generate_and_rm_group
from slime.rollout.request_abort import abort_calls
from slime.rollout.stream import stream
from slime.types import SampleGroup

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "generate_streaming",
    "get_model_url",
]
generate_streaming = generate
"""slime streams answers to have the tokens of an aborted request. The engines of this project return these tokens with
the aborted answer."""


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Returns a rollout of `--rollout-batch-size` groups. With `evaluation`, runs all evaluation datasets instead."""
    own = GenerateState(args)
    if evaluation:
        return own.run(eval_rollout(args, rollout_id))[0]
    return own.run(generate_rollout_async(args, rollout_id, data_source))[0]


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source: DataSource
) -> tuple[RolloutFnTrainOutput, list[SampleGroup]]:
    """Returns a rollout as `generate_rollout` does, and the aborted groups.

    `data_source` is the source, or its method `get_samples`, as in slime. The list of aborted groups is empty, because
    the rollout itself puts groups back into the source (--partial-rollout). Raises ValueError for another callable.
    """
    bound = getattr(data_source, "__self__", data_source)
    source: DataSource = data_source if hasattr(data_source, "get_samples") else bound
    if not hasattr(source, "get_samples"):
        raise ValueError(
            f"data_source must have get_samples and add_samples, got {type(data_source).__name__}; pass the "
            "data_source that the rollout function got"
        )
    return await stream.generate_rollout_async(GenerateState(args), rollout_id, source), []


async def eval_rollout(args: Namespace, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[SampleGroup]]:
    """Returns the evaluation of all datasets as `generate_rollout` does, and an empty list, as in slime."""
    return await evaluation.eval_rollout(GenerateState(args), rollout_id), []


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
    serves a single model, at `args.router_url`. Raises ValueError if the run serves several models and `name` is
    unknown."""
    routers: dict[str, str] = getattr(args, "model_routers", None) or {}
    if routers and name not in routers:
        raise ValueError(f"name must be one of {sorted(routers)}, got {name!r}; the run serves these models")
    return f"{routers.get(name, args.router_url)}{endpoint}"
