"""Rules of debug flags, and of the length of a run."""

from __future__ import annotations

from slime.config.fields import spelled
from slime.config.schema import Config
from slime.config.sections.debug import profiled_steps


def check_length(c: Config) -> None:
    """--train-iters and --train-samples are a whole number of rollouts, and that of --num-rollout."""
    d, steps = c.data, c.data.num_steps_per_rollout
    for name, of_rollout in (
        ("train_iters", steps),
        ("train_samples", d.rollout_batch_size * d.n_samples_per_prompt),
    ):
        if of_rollout and (given := c.value_of(name)) not in (None, (d.num_rollout or 0) * of_rollout):
            rollouts = "" if d.num_rollout is None else f" * --num-rollout {d.num_rollout}"
            raise ValueError(
                f"{spelled(name)} must be a number of whole rollouts, {of_rollout} each{rollouts}, got {given}; give "
                "--num-rollout alone"
            )


def check_train_data_file(c: Config) -> None:
    """No rank and no rollout writes over another's file."""
    if (template := c.debug.save_debug_train_data) is None:
        return
    try:
        one = template.format(rollout_id=0, rank=0)
        apart = template.format(rollout_id=1, rank=0) != one != template.format(rollout_id=0, rank=1)
    except (KeyError, IndexError, ValueError):
        apart = False
    if not apart:
        raise ValueError(
            f"--save-debug-train-data must hold {{rollout_id}} and {{rank}} and no other braces, got {template}; each "
            "rank writes a file a rollout"
        )


def check_profile_steps(c: Config) -> None:
    """The range of --profile-steps must contain a training step of the run."""
    steps = profiled_steps(c.debug.profile_steps)
    if steps and c.debug.debug_rollout_only:
        raise ValueError(
            f"--profile-steps must not be combined with --debug-rollout-only, got {c.debug.profile_steps}; "
            "it traces training"
        )
    if steps and c.data.num_rollout is not None and steps.start >= c.data.num_rollout:
        raise ValueError(
            f"--profile-steps must begin below --num-rollout, got {c.debug.profile_steps} and "
            f"{c.data.num_rollout}; rollouts "
            "count from 0"
        )
