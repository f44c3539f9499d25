"""Import path of slime plug-ins: see slime.http."""

from slime.http import get, post

__all__ = ["get", "post"]
