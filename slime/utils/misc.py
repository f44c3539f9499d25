"""Import path of slime plug-ins: see slime.hooks and slime.singleton."""

from slime.hooks import load_function
from slime.singleton import SingletonMeta

__all__ = ["SingletonMeta", "load_function"]
