"""Import path of slime plug-ins: see slime.http."""

from slime.http import post

__all__ = ["post"]
