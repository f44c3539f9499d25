"""verl's replay buffer for against_peers.py, without verl's wait of up to 2 s at the end of a rollout.

verl's synchronous trainer asks every 2 s whether all responses have arrived. verl has no setting for this time, but it
accepts a class of its users (`trainer.v1.sampler.custom_sampler`).
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_S = 0.05


class QuickReplayBuffer(ReplayBuffer):
    """verl's replay buffer, which asks every POLL_S."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=POLL_S)
