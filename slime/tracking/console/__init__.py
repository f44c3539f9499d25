"""Prints a run's console output: step lines, samples, progress bars, and the last lines. Prints metrics and computes
none."""

from slime.tracking.console.columns import HELD_OUT, LEFT, choose_columns
from slime.tracking.console.line import HEADER_EVERY, StepLine, progress

__all__ = ["HEADER_EVERY", "HELD_OUT", "LEFT", "StepLine", "choose_columns", "progress"]
