"""`vime doctor`: does this machine have what a run needs? One check a function, one table of checks (command.py)."""
