"""The phases of a run that its memory depends on. The plan adds up each, and a run measures each."""

from __future__ import annotations

LOADING = "loading"
FIRST_WEIGHTS = "first weights"
GENERATING = "generating"
HAND_OVER = "hand-over"
TRAINING = "training"
SAVING = "saving"
PHASES = (LOADING, FIRST_WEIGHTS, GENERATING, HAND_OVER, TRAINING, SAVING)
"""In the order in which a run first reaches them."""

PHASE_OF_TIMER = {
    "train_wait": GENERATING,
    "sleep": HAND_OVER,
    "wake_up": HAND_OVER,
    "update_weights": HAND_OVER,
    "train": TRAINING,
    "save_model": SAVING,
}
"""The driver's timers (`slime.tracking.timers`) that are such a phase."""
