"""`vime doctor` checks whether this machine has what a run needs. One function per check; command.py lists them."""
