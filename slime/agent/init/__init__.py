"""The process that owns one sandbox: it starts commands, watches limits and ends everything. Standard library only.

It runs as `python -I -S`, in bubblewrap where the host has it, so nothing here may import another part of slime.
"""
