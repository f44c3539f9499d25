"""Contains the checks before a run starts, for `vime train` and `vime plan`."""
