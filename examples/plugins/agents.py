"""Several agents for one prompt: a solver answers, and a reviewer writes about the answer. Both are trained.

    --custom-generate-function-path agents.solve_and_review --custom-rm-path agents.score

The samples in the returned list are siblings: they share a rollout id, and together have the weight of one sample.
"""

from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample


async def solve_and_review(args, sample: Sample, sampling_params) -> list[Sample]:
    """Returns the solver's sample and, unless it was aborted, the reviewer's."""
    solver = await generate(args, sample, dict(sampling_params))
    solver.train_metadata = {"agent": "solver"}
    if solver.status is Sample.Status.ABORTED:
        return [solver]
    reviewer = Sample(
        group_index=solver.group_index,
        index=solver.index,
        prompt=f"{solver.prompt}{solver.response}\nIs this right?",
        label=solver.label,
        metadata=dict(solver.metadata),
        session_id=f"{solver.session_id}/review",
        train_metadata={"agent": "reviewer"},
    )
    return [solver, await generate(args, reviewer, dict(sampling_params))]


async def score(args, samples, **kwargs) -> list[float]:
    """Returns the solver's reward for both agents."""
    right = next(float(s.label in s.response) for s in samples if s.train_metadata["agent"] == "solver")
    return [right for _ in samples]
