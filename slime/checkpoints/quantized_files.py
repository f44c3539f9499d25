"""Reads from the files of a checkpoint which weights it stores in quantised form."""

from __future__ import annotations

from pathlib import Path

from slime.checkpoints.hf_config import read_hf_config
from slime.checkpoints.hf_files import Files
from slime.models import family_for
from slime.models.quantized.quantized_checkpoint import QuantizedWeights


def read_quantized_weights(checkpoint: str) -> QuantizedWeights | None:
    """Returns the quantised weights of an HF directory under the names of the weight table. Returns None for a
    checkpoint with plain weights."""
    hf = read_hf_config(checkpoint)
    family = family_for(hf)
    scheme = family.scheme(hf)
    return (
        None
        if scheme is None
        else QuantizedWeights.from_files(family.renamed(Files(Path(checkpoint))), scheme)
    )
