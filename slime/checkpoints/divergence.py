"""Training that has diverged: the error of weights, log-probs and gradients that are not finite."""

from __future__ import annotations

from pathlib import Path

from slime.checkpoints.checkpoint_files import iterations


class DivergedError(FloatingPointError):
    """`problem` names the value that is not finite. `rollout_id` is the first rollout that may have bad weights."""

    def __init__(self, problem: str, rollout_id: int) -> None:
        super().__init__(problem, rollout_id)
        self.problem, self.rollout_id = problem, rollout_id

    def __str__(self) -> str:
        return self.problem

    def with_checkpoint(self, save: str | None) -> DivergedError:
        """Returns the same error with the newest checkpoint of --save that is older than `rollout_id`."""
        saved = [] if save is None else iterations(Path(save))
        good = max((iteration for iteration in saved if iteration < self.rollout_id), default=None)
        hint = "start again with"
        if good is not None:
            hint = f"iteration {good} of {save} is from before that: resume with --load {save} --ckpt-step {good} and"
        return DivergedError(
            f"{self.problem}; {hint} a lower --lr, and see the batch with --save-debug-rollout-data",
            self.rollout_id,
        )
