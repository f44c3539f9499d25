"""`vime doctor` checks that a run can start on this machine. Each check is one function; command.py lists them."""
