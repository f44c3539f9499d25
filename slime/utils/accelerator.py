"""Import path of slime plug-ins: see slime.plug_ins.devices."""

from slime.plug_ins.devices import *  # noqa: F403
