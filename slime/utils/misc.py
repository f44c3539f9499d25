"""Import path of slime plug-ins: see slime.hooks."""

from slime.hooks import load_function

__all__ = ["load_function"]
