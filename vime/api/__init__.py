"""The Python API: `vime.train` starts a run with the flags of the command line, and a `Run` reads its records.

The run is a separate process, so it works in a notebook: an event loop or a Ray cluster of the notebook does not
matter, and the notebook's process keeps no weights. Functions of the caller are copied to the run.
"""

from vime.api.launch import train
from vime.api.records import Run

__all__ = ["Run", "train"]
