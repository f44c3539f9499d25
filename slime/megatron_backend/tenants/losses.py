"""The losses of a service, from log-probs. Each is a sum over tokens, as in the documentation of the Tinker protocol.

`log_probs` [R] are those of the present adapter, and the columns [R] are the inputs of a pass:

    cross_entropy         -(weights * log_probs).sum()
    importance_sampling   -(ratio * advantages).sum()                    ratio = exp(log_probs - logprobs)
    ppo                   -min(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
    cispo                 -(ratio.clamp(low, high).detach() * log_probs * advantages).sum()
    dro                   -(log_probs * advantages - beta / 2 * (log_probs - logprobs) ** 2).sum()
    gspo                  as ppo, with s * exp(log_probs - log_probs.detach()) in place of ratio
                          s = exp(mean of log_probs.detach() - logprobs over the datum's tokens in sequence_ratio_mask)

The clip range of gspo is by default the one of its paper (arXiv 2507.18071), since the protocol's documentation that we
could read does not state one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime.protocols.tenants import LossSpec, TenantDatum

TARGETS, WEIGHTS, SAMPLED, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
LOW, HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
IN_RATIO = "sequence_ratio_mask"
DATUM = "datum"
"""The column with the number of each token's datum. All other columns are inputs of the client."""

Columns = Mapping[str, Tensor]
"""Inputs and settings of a pass by name, [R] each."""


def cross_entropy(log_probs: Tensor, columns: Columns) -> Tensor:
    return -log_probs * columns[WEIGHTS]


def importance_sampling(log_probs: Tensor, columns: Columns) -> Tensor:
    return -(log_probs - columns[SAMPLED]).exp() * columns[ADVANTAGES]


def clipped_objective(log_probs: Tensor, columns: Columns) -> Tensor:
    return _clip((log_probs - columns[SAMPLED]).exp(), columns)


def sequence_objective(log_probs: Tensor, columns: Columns) -> Tensor:
    """Computes a clipped objective with one ratio per datum. A datum's sums have its tokens only, so that they do not
    depend on the other data of a micro-batch."""
    counted = columns[IN_RATIO] != 0
    differences = (log_probs.detach() - columns[SAMPLED]).where(counted, 0.0)
    sizes = columns[DATUM].unique_consecutive(return_counts=True)[1].tolist()
    means = [
        (x.sum() / some.sum()).expand(len(x))
        for x, some in zip(differences.split(sizes), counted.split(sizes), strict=True)
    ]
    return _clip((torch.cat(means) + log_probs - log_probs.detach()).exp(), columns)


def _clip(ratio: Tensor, columns: Columns) -> Tensor:
    clipped = ratio.clamp(columns[LOW], columns[HIGH])
    return -torch.minimum(ratio * columns[ADVANTAGES], clipped * columns[ADVANTAGES])


def clipped_ratio(log_probs: Tensor, columns: Columns) -> Tensor:
    clipped = (log_probs - columns[SAMPLED]).exp().clamp(columns[LOW], columns[HIGH])
    return -clipped.detach() * log_probs * columns[ADVANTAGES]


def direct_reward(log_probs: Tensor, columns: Columns) -> Tensor:
    difference = log_probs - columns[SAMPLED]
    return columns[BETA] / 2 * difference.square() - log_probs * columns[ADVANTAGES]


@dataclass(frozen=True)
class TokenLoss:
    """A loss: the function that returns it per token, the inputs that each datum must have, and the settings with their
    defaults. A datum may have a value of a setting per token."""

    compute: Callable[[Tensor, Columns], Tensor]
    needed: tuple[str, ...] = (SAMPLED, ADVANTAGES)
    settings: Mapping[str, float] = field(default_factory=dict)
    per_token: Mapping[str, float] = field(default_factory=dict)
    """Optional inputs with their defaults."""


_CLIPS = {LOW: 0.8, HIGH: 1.2}
LOSSES: dict[str, TokenLoss] = {
    "cross_entropy": TokenLoss(cross_entropy, (), per_token={WEIGHTS: 1.0}),
    "importance_sampling": TokenLoss(importance_sampling),
    "ppo": TokenLoss(clipped_objective, settings=_CLIPS),
    "cispo": TokenLoss(clipped_ratio, settings=_CLIPS),
    "dro": TokenLoss(direct_reward, settings={BETA: 0.05}),
    "gspo": TokenLoss(sequence_objective, (SAMPLED, ADVANTAGES, IN_RATIO), {LOW: 1 - 3e-4, HIGH: 1 + 4e-4}),
}


def check_loss(loss: LossSpec) -> None:
    """Raises ValueError for an unknown loss, or for a setting that the loss does not have."""
    if loss.name not in LOSSES:
        raise ValueError(f"the loss must be one of {', '.join(LOSSES)}, got {loss.name}; choose one")
    known = LOSSES[loss.name].settings
    if unknown := sorted(set(loss.config) - set(known)):
        allowed = ", ".join(known) or "no setting"
        raise ValueError(
            f"{loss.name} must have only the settings it reads, {allowed}, got {unknown[0]}; leave it out"
        )


def check_datum(number: int, datum: TenantDatum, loss: LossSpec, vocab: int, context: int) -> None:
    """Raises ValueError unless the datum has the inputs of the loss, one finite value per token."""
    size = len(datum.tokens)
    if not 0 < size <= context:
        raise ValueError(f"datum {number} must have 1 to {context} tokens, got {size}; shorten it")
    described = LOSSES[loss.name]
    optional = (*described.per_token, *described.settings)
    needed = (TARGETS, *described.needed)
    for name in needed:
        if name not in datum.inputs:
            raise ValueError(f"datum {number} must have {name} for {loss.name}, got {_names(datum)}; add it")
    for name, values in datum.inputs.items():
        if name not in needed + optional:
            raise ValueError(
                f"datum {number} must have only inputs of {loss.name}, {', '.join(needed + optional)}, got {name}; "
                "leave it out"
            )
        if len(values) != size:
            raise ValueError(
                f"datum {number} must have one value of {name} per token, got {len(values)} for {size} tokens; "
                "correct its length"
            )
        if name != TARGETS and not torch.tensor(values, dtype=torch.float64).isfinite().all():
            raise ValueError(
                f"datum {number} must have finite values of {name}; check how they were computed"
            )
    if IN_RATIO in needed and not any(datum.inputs[IN_RATIO]):
        raise ValueError(
            f"datum {number} must have a token in {IN_RATIO}, got only zeros; mark the sampled tokens with 1"
        )
    for name, ids in (("tokens", datum.tokens), (TARGETS, datum.inputs[TARGETS])):
        if min(ids) < 0 or max(ids) >= vocab:
            raise ValueError(
                f"datum {number} must have {name} from 0 to {vocab - 1}, got {min(ids)} to {max(ids)}; was the text "
                "encoded with the base model's tokenizer?"
            )


def _names(datum: TenantDatum) -> str:
    return ", ".join(sorted(datum.inputs)) or "no inputs"


def make_columns(data: list[TenantDatum], loss: LossSpec, device: torch.device) -> dict[str, Tensor]:
    """Returns the inputs of a loss [R] for data in one row. A setting without a value per token is the same
    for all tokens of its datum."""
    described = LOSSES[loss.name]
    defaults = {**described.per_token, **described.settings, **loss.config}
    sizes = torch.tensor([len(datum.tokens) for datum in data], device=device)
    columns: dict[str, Tensor] = {DATUM: torch.arange(len(data), device=device).repeat_interleave(sizes)}
    for name in (*described.needed, *defaults):
        values: list[float] = []
        for datum in data:
            found = datum.inputs.get(name)
            values += [defaults[name]] * len(datum.tokens) if found is None else [float(x) for x in found]
        columns[name] = torch.tensor(values, dtype=torch.float32, device=device)
    return columns
