"""HTTP requests under the path that slime plug-ins use."""

from slime.http import post

__all__ = ["post"]
