"""Functions for the process and its machine: imports, disk space, locks, and long waits.

A file here imports nothing of training. `vime.cli` imports this package before any other package, so this file imports
nothing.
"""
