"""DeepSeek-V3 and the models of its architecture: DeepSeek-R1, Moonlight and Kimi K2.

The models have latent attention, and dense first layers before the layers with experts. The experts have sigmoid scores
with a correction bias, and a token's experts come from the best groups. The layers have a shared expert, and one layer
of multi-token prediction follows.
"""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.latent import LATENT_EXPERTS, LAYER, read_latent
from slime.models.reading import sparse_layers, with_predictions
from slime.models.rows import IGNORED, later_predictions


def read(hf: Hf) -> Decoder:
    return with_predictions(hf, read_latent(hf, sparse_layers(hf)))


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepSeek-V3, experts",
    "V3, R1, Moonlight-16B-A3B",
    LATENT_EXPERTS,
    read,
    ignored=IGNORED,
    prediction=later_predictions(LAYER),
    flags=(("qk_layernorm", lambda hf: True),),
)
