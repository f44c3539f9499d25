"""The distribution: command line, vLLM engines, plan, audit, benchmarks. Its import installs `vime.alias`."""

from vime.alias import install

install()
