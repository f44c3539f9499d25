"""The training stack: configuration, algorithms, data, rollout, Ray placement, Megatron, weight transfer.

The import installs the finder of `slime.system.upstream` for slime's import paths that are no files here.
"""

from slime.system.upstream import install

install()
