"""MiMo, dense: Qwen2's layers, and layers of multi-token prediction with their own names."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.families.qwen import qwen2
from slime.models.family import Family, Prediction
from slime.models.layouts import SwappedHalves
from slime.models.reading import with_predictions
from slime.models.rows import ATTENTION, DENSE, IGNORED, MLP, NORMS, prediction_rows

LAYERS = "model.mtp_layers."


def read(hf: Hf) -> Decoder:
    return with_predictions(hf, qwen2.read(hf))


def predicted(hf: Hf) -> tuple[str, ...]:
    """Returns the prefix of the prediction layers' names, which differ from the decoder's names."""
    return (LAYERS,) if hf.get("num_nextn_predict_layers") else ()


PREDICTION = Prediction(
    prediction_rows(
        NORMS + ATTENTION + MLP,
        LAYERS + "{i}.",
        embedding="token_layernorm",
        state="hidden_layernorm",
        product="input_proj",
        last="final_layernorm",
        layout=SwappedHalves(),
    ),
    first=lambda hf: 0,
)

MIMO = Family(
    *("mimo", "MiMo, dense", "7B Base, SFT and RL", DENSE, read),
    ignored=IGNORED,
    predicted=predicted,
    prediction=PREDICTION,
)
