"""Build entry for pip; all metadata is in pyproject.toml."""

from setuptools import setup

setup()
