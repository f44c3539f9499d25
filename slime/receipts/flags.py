"""The rules of --receipt: the files that it needs, and the key. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.config import Config
from slime.receipts.keys import read_private_key
from slime.records.errors import FlagError

FOLDER = "receipt"
"""Folder of the receipts in the run directory, with one file per trainer rank."""


def fill_saved(c: argparse.Namespace) -> None:
    """Lets a run with --dump-details or --receipt save the samples and the columns per rollout."""
    if c.dump_details:
        folder, samples, columns = c.dump_details, "rollout_data", "train_data"
    elif c.receipt:
        folder = str(Path(c.run_dir).absolute() / FOLDER).replace("{", "{{").replace("}", "}}")
        samples, columns = "samples", "columns"
    else:
        return
    c.save_debug_rollout_data = c.save_debug_rollout_data or f"{folder}/{samples}/{{rollout_id}}.pt"
    c.save_debug_train_data = c.save_debug_train_data or f"{folder}/{columns}/{{rollout_id}}_{{rank}}.pt"


def check_receipt(c: Config) -> None:
    """Raises ValueError for a key that cannot sign, and for a run without training."""
    if not c.debug.receipt:
        return
    if c.debug.debug_rollout_only:
        raise FlagError(
            "--receipt",
            "be left out with --debug-rollout-only",
            "both",
            "a receipt has the steps of a trainer",
        )
    if c.debug.receipt_key is not None:
        read_private_key(c.debug.receipt_key)
