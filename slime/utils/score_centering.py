"""Import path of slime plug-ins: see slime.plug_ins.score_centering."""

from slime.plug_ins.score_centering import (
    get_score_centering_is_config,
    score_centering_correction,
    score_centering_request,
    validate_score_centering_args,
)

__all__ = [
    "get_score_centering_is_config",
    "score_centering_correction",
    "score_centering_request",
    "validate_score_centering_args",
]
