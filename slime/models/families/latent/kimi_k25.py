"""The text model of Kimi K2.5 and K2.6, which is that of Kimi K2. The trainer does not build the vision tower. An
export copies its tensors from the checkpoint."""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.families.latent.kimi_k2 import KIMI_K2
from slime.models.latent import read_latent
from slime.models.reading import only, sparse_layers
from slime.models.rows import IGNORED

TEXT = "language_model."


def read(hf: Hf) -> Decoder:
    only(hf, num_nextn_predict_layers=0)
    return read_latent(hf, sparse_layers(hf))


def carried(hf: Hf) -> tuple[str, ...]:
    """Returns the prefixes of the vision tower and of its projection into the text model."""
    return "vision_tower.", "mm_projector."


KIMI_K25 = replace(
    KIMI_K2,
    model_type="kimi_k25",
    title="Kimi K2.5 and 2.6, experts, text",
    models="1T-A32B",
    rows=tuple(replace(row, hf=tuple(TEXT + name for name in row.hf)) for row in KIMI_K2.rows),
    read=read,
    ignored=tuple(TEXT + name for name in IGNORED),
    predicted=carried,
    prediction=None,
    module_prefix=(TEXT + "model.", "model.language_model."),
)
