"""What `vime bench op` runs: problems, contenders, timing in one hot state, targets, tables.

Nothing here is loaded by `import rl_kernel`.
"""
