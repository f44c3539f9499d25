"""Reads the engines of a run from its events: `engine` events have their states, `weights` events their weight
versions, and `load` events their load.

    starting -> serving -> dead -> starting ...      a server that died is replaced
                serving -> leaving -> removed        `vime engines remove`
    starting -> failed                               `vime engines add`, whose server did not start

A `control_socket` event begins a run: engines of a run before it are gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.tracking.journal import Event

UNKNOWN = "unknown"
"""State of an engine whose start is not in the journal."""
ENGINE_KINDS = ("control_socket", "engine", "weights", "load")


@dataclass
class EngineRecord:
    """One engine of a run."""

    name: str
    model: str
    state: str = ""
    address: str = ""
    location: str = ""
    since: float = 0.0
    """Start time of its present server, in seconds since the epoch."""
    version: int | None = None
    """Version of its weights. None means those of its checkpoint."""
    running: int | None = None
    """Number of its running requests, or None if unknown."""
    waiting: int | None = None
    kv_cache: float | None = None
    """Used share of its memory for keys and values, 0 to 1."""


@dataclass
class RunEngines:
    """The engines of the last run in a directory, and the path of its control socket."""

    socket: str = ""
    host: str = ""
    pid: int = 0
    engines: dict[str, EngineRecord] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Adds one event. Kinds that do not concern engines change nothing."""
        match event.kind:
            case "control_socket":
                self.socket, self.host = str(event["socket"]), str(event["host"])
                self.pid = event["pid"]
                self.engines.clear()
            case "engine":
                self._change(event)
            case "load" if event["engine"] in self.engines:
                engine = self.engines[event["engine"]]
                engine.running, engine.waiting = event["running"], event["waiting"]
                engine.kv_cache = event["kv_cache"]
            case "weights":
                for name in event["engines"]:
                    self._named(name, event["model"]).version = event["version"]

    def _change(self, event: Event) -> None:
        engine = self._named(event["engine"], event["model"])
        engine.state = str(event["state"])
        if engine.state == "starting":
            engine.address, engine.location = str(event.get("address", "")), str(event.get("place", ""))
            engine.since, engine.version = event.time, None
            engine.running = engine.waiting = engine.kv_cache = None
        if engine.state == "serving":
            engine.version = event.get("version")

    def _named(self, name: str, model: str) -> EngineRecord:
        """Returns the record of an engine, and makes it if needed, because the line with the engine's start may be
        lost."""
        return self.engines.setdefault(name, EngineRecord(name, model, UNKNOWN))
