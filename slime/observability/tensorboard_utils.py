"""Import path of slime plug-ins: see slime.plug_ins.tensorboard."""

from slime.plug_ins.tensorboard import _TensorboardAdapter

__all__ = ["_TensorboardAdapter"]
