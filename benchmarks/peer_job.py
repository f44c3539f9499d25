"""Defines the settings of a run that every peer has. A peer's own environment imports this file, which needs Python's
standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PeerJob:
    """One run. `steps` is the number of optimizer steps per rollout. `prompts` has JSON lines with prompt and label."""

    model: str
    prompts: str
    prompt_key: str
    label_key: str
    out: str
    run_dir: str
    rollouts: int
    prompts_per_rollout: int
    answers: int
    max_tokens: int
    steps: int
    lr: float
    recompute: bool
    context: int
    engine_share: float
    seed: int
