"""The policy losses: one file per policy loss, or one file for close relatives, and a line in SURROGATES."""

from __future__ import annotations

from slime.algo.surrogates.cispo import CISPO_LOSS, compute_cispo_loss
from slime.algo.surrogates.clip import CLIPPED, compute_policy_loss
from slime.algo.surrogates.covariance import CLIP_COV, KL_COV
from slime.algo.surrogates.gmpo import GMPO_LOSS
from slime.algo.surrogates.gspo import GSPO_LOSS, GSPO_TOKEN
from slime.algo.surrogates.record import Surrogate
from slime.algo.surrogates.reinforce import CENTRED, REINFORCE_LOSS
from slime.algo.surrogates.sapo import SAPO_LOSS

SURROGATES: dict[str, Surrogate] = {
    record.name: record
    for record in (
        CLIPPED,
        GSPO_LOSS,
        GSPO_TOKEN,
        CISPO_LOSS,
        GMPO_LOSS,
        SAPO_LOSS,
        CLIP_COV,
        KL_COV,
        REINFORCE_LOSS,
    )
}

__all__ = [
    "CENTRED",
    "CISPO_LOSS",
    "CLIPPED",
    "GSPO_LOSS",
    "SURROGATES",
    "Surrogate",
    "compute_cispo_loss",
    "compute_policy_loss",
]
