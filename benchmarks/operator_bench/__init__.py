"""The code of `vime bench op`: problems, contenders, timing in one hot state, targets, tables.

`import rl_kernel` loads no module of this package.
"""
