"""The distribution: command line, vLLM engines, plan, audit, benchmarks. Importing it installs `vime.alias`."""

from vime.alias import install

install()
