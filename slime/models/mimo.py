"""MiMo, dense: Qwen2's layers, and layers of multi-token prediction that vime carries from the checkpoint to an
export."""

from __future__ import annotations

from slime.models.decoder import Hf
from slime.models.family import Family
from slime.models.qwen2 import read
from slime.models.rows import DENSE, IGNORED


def predicted(hf: Hf) -> tuple[str, ...]:
    """All such layers have names of their own."""
    return ("model.mtp_layers.",) if hf.get("num_nextn_predict_layers") else ()


MIMO = Family("mimo", "MiMo, dense", "7B Base, SFT and RL", DENSE, read, ignored=IGNORED, predicted=predicted)
