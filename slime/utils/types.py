"""The records of a rollout under the path that slime plug-ins use."""

from slime.types import Sample

__all__ = ["Sample"]
