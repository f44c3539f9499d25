"""GSPO (2507.18071) has one clipped ratio per sequence, `s = exp((mask * (new - old)).sum() / mask.sum())`.

The ratio of GSPO-token is `s.detach() * exp(new - new.detach())`, which has the value of `s` and the gradient of the
token. With one advantage per sequence, GSPO and GSPO-token have the same gradient. With advantages per token, each
token of GSPO-token follows its own advantage.
"""

from __future__ import annotations

from slime.algo.surrogates.clip import CLIPS, below_one, clipped
from slime.algo.surrogates.record import Surrogate

GSPO_LOSS = Surrogate(
    "gspo",
    "clipped ratio per sequence",
    clipped,
    source="2507.18071",
    ratio="sequence",
    fused=True,
    reads=frozenset({"old_log_probs"}),
    flags=CLIPS,
    aliases=("sequence",),
    checks=(below_one,),
)
GSPO_TOKEN = Surrogate(
    "gspo_token",
    "clipped ratio per sequence, with the gradient of the token",
    clipped,
    source="2507.18071",
    ratio="sequence_token",
    fused=True,
    flags=CLIPS,
    aliases=("gspo-token", "sequence_token"),
    checks=(below_one,),
)
