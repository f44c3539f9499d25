"""What one engine is told of a weight update: its parts, and that they are all."""

from __future__ import annotations

import http.client

from slime.protocols import WeightUpdate
from slime.weight_sync.group import give_up
from vime.engine.control import ControlError, EngineControl


def load(control: EngineControl, update: WeightUpdate) -> None:
    """One engine, paused or idle, takes a whole update."""
    control.start_weight_update()
    load_part(control, update)
    finish(control, update.version)


def load_part(control: EngineControl, part: WeightUpdate) -> None:
    checksums = {} if part.checksums is None else {"checksums": part.checksums}
    try:
        control.update_weights({**part.info, **checksums})
    except (ControlError, OSError, http.client.HTTPException):
        if group := part.info.get("group"):
            give_up(group)  # at once: the trainer and the other engines wait for this one
        raise


def finish(control: EngineControl, version: int) -> None:
    """The update is complete; keys and values computed with the weights before are dropped."""
    control.finish_weight_update(version)
    control.reset_prefix_cache()
