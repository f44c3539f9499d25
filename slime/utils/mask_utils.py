"""Import path of slime plug-ins: see slime.loss_mask."""

from slime.loss_mask import MultiTurnLossMaskGenerator, get_response_lengths

__all__ = ["MultiTurnLossMaskGenerator", "get_response_lengths"]
