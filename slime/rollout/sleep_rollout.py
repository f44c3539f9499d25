"""A rollout that never ends: the engines serve and nothing trains.

Use: `--rollout-function-path slime.rollout.sleep_rollout.sleep`.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from typing import NoReturn

logger = logging.getLogger(__name__)

LOG_EVERY_S = 3600.0


def sleep(args: Namespace, rollout_id: int, data_source: object, evaluation: bool = False) -> NoReturn:
    """Wait until the run is interrupted, so that the engines can be measured by hand."""
    while True:
        logger.warning("the rollout function sleeps and the engines serve; interrupt the run to end it")
        time.sleep(LOG_EVERY_S)
