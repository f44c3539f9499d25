"""Import path of slime plug-ins: see slime.loss_mask."""

from slime.loss_mask import MultiTurnLossMaskGenerator

__all__ = ["MultiTurnLossMaskGenerator"]
