"""Import path of slime's launch scripts: see slime.plug_ins.dataclass_cli."""

from slime.plug_ins.dataclass_cli import dataclass_cli

__all__ = ["dataclass_cli"]
