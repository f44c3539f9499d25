"""A number that is not finite ends the run where it arises. The error names the rollout and the last good
checkpoint."""

from __future__ import annotations

import pickle

from slime.checkpoints.checkpoint_dir import COMPLETE, iteration_path
from slime.checkpoints.divergence import DivergedError


def test_the_newest_checkpoint_from_before_is_named(tmp_path):
    for iteration in (1, 3, 5, 12):
        iteration_path(tmp_path, iteration).mkdir()
        (iteration_path(tmp_path, iteration) / COMPLETE).write_text("{}")
    iteration_path(tmp_path, 4).mkdir()  # it is not complete
    error = DivergedError("weights must be finite, got nan after training rollout 5", 5)
    assert str(error.with_checkpoint(str(tmp_path))) == (
        f"weights must be finite, got nan after training rollout 5; iteration 3 of {tmp_path} is from before that: "
        f"resume with --load {tmp_path} --ckpt-step 3 and a lower --lr, "
        "and see the batch with --save-debug-rollout-data"
    )
    first = DivergedError("weights must be finite, got nan after training rollout 1", 1)
    for save in (str(tmp_path), str(tmp_path / "absent"), None):
        assert "; start again and a lower --lr" not in str(first.with_checkpoint(save))
        assert "; start again with a lower --lr" in str(first.with_checkpoint(save))


def test_it_travels_between_processes():
    error = pickle.loads(pickle.dumps(DivergedError("weights must be finite", 7)))
    assert (str(error), error.rollout_id) == ("weights must be finite", 7)
