"""The process that owns one sandbox: it starts commands, watches limits and ends everything. Standard library only.

It runs by itself (`python -I -S`), so nothing here may import another part of slime.
"""
