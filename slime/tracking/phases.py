"""Defines the phases of a run on which its memory depends. The plan computes each phase's memory, and a run measures
it."""

from __future__ import annotations

LOADING = "loading"
FIRST_WEIGHTS = "first weights"
GENERATING = "generating"
HAND_OVER = "hand-over"
TRAINING = "training"
SAVING = "saving"
PHASES = (LOADING, FIRST_WEIGHTS, GENERATING, HAND_OVER, TRAINING, SAVING)
"""Phases in the order in which a run first reaches them."""

PHASE_OF_TIMER = {
    "train_wait": GENERATING,
    "sleep": HAND_OVER,
    "wake_up": HAND_OVER,
    "update_weights": HAND_OVER,
    "train": TRAINING,
    "save_model": SAVING,
}
"""Maps the driver's timers (`slime.tracking.timers`) to the phase that they measure."""
