"""Loss masks of conversations under the path that slime plug-ins use."""

from slime.loss_mask import MultiTurnLossMaskGenerator

__all__ = ["MultiTurnLossMaskGenerator"]
