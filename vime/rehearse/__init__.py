"""`vime rehearse`: runs a launch on this CPU with a tiny model of the same family, and lists what would fail."""
