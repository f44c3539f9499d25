"""A solver answers, and a critic judges the answer: two roles of one policy, in one rollout, with a reward for each.

    PYTHONPATH=examples/multi-agent vime train ... --custom-generate-function-path solver_critic.generate \
        --custom-rm-path solver_critic.score --custom-reward-post-process-path solver_critic.advantages \
        --custom-rollout-log-function-path solver_critic.log

`generate` returns one sample per role. The samples are siblings: together they have the weight of one sample.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import rl_kernel
from slime.rollout.sglang_rollout import generate as generate_one
from slime.utils.types import Sample

SOLVER, CRITIC = "solver", "critic"
QUESTION = "Is this right? Say yes or no."


def _of_role(sample: Sample, role: str, messages: list[dict[str, str]]) -> Sample:
    """Returns a new sample with the same group and index, and with a separate random stream (`session_id`)."""
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=messages,
        label=sample.label,
        metadata={**sample.metadata, "role": role},
        apply_chat_template_kwargs={},
        session_id=f"{sample.session_id}/{role}",
    )


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Returns the solver's sample and, unless the rollout aborted it, the critic's. `sample.prompt` is the question."""
    asked = [{"role": "user", "content": sample.prompt}]
    solver = await generate_one(args, _of_role(sample, SOLVER, asked), dict(sampling_params))
    if solver.status is Sample.Status.ABORTED:
        return [solver]
    answer = solver.response.removesuffix("<|im_end|>")
    judged = [*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": QUESTION}]
    critic = await generate_one(args, _of_role(sample, CRITIC, judged), dict(sampling_params))
    return [solver, critic]


async def score(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    """Returns 1 for a solver's answer with the label, and 1 for a critic's right judgement."""
    right = next(str(s.label) in s.response for s in samples if s.metadata["role"] == SOLVER)
    return [
        float(right if s.metadata["role"] == SOLVER else s.response.lower().startswith(("no", "yes")[right]))
        for s in samples
    ]


async def score_untrained(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    """Returns rewards for untrained weights: the share of odd ids among the solver's tokens, and of even ids among the
    critic's. To get both rewards, the policy must recognise its role from the prompt."""
    rewards = []
    for sample in samples:
        response = sample.tokens[-sample.response_length :]
        odd = sum(token % 2 for token in response) / len(response)
        rewards.append(odd if sample.metadata["role"] == SOLVER else 1 - odd)
    return rewards


def advantages(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Returns raw rewards, and advantages that compare each reward with the rewards of the same role in the group.

    Without this hook, both roles would be compared with one common mean. All answers of the role with the higher
    rewards would then have positive advantages, and the answers of the other role negative ones.
    """
    raw = [float(sample.reward) for sample in samples]
    places: dict[tuple[int, str], int] = {}
    groups = [places.setdefault((s.group_index, s.metadata["role"]), len(places)) for s in samples]
    return raw, rl_kernel.group_advantage(torch.tensor(raw), torch.tensor(groups)).tolist()


def log(rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool:
    """Adds each role's mean reward to the metrics. Returns False, so that vime logs them."""
    for role in (SOLVER, CRITIC):
        its = [float(s.reward) for s in samples if s.metadata["role"] == role]
        metrics[f"rollout/raw_reward/{role}"] = statistics.fmean(its)
    return False
