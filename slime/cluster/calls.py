"""Waits for the results of Ray actors' calls, and raises an error that names the actor that failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from slime.config import Config
from slime.user_code import add_location

Actor: TypeAlias = "ActorHandle[Any]"
"""Handle of a process, whose methods are remote."""

Ref: TypeAlias = "ray.ObjectRef[Any]"
"""A call of an actor, whose result Ray stores."""


def log_path(config: Config, name: str) -> Path:
    return Path(config.logging.run_dir).resolve() / "logs" / f"{name}.log"


DIED = "its process died without an error: it was killed, ran out of memory, or crashed"
"""Reason of an error if Ray has reported no cause."""


class ActorError(RuntimeError):
    """Raised when a call of an actor fails. The message has the actor's name and the actor's error. `log` is the
    actor's log file. `details` is the remote traceback, or Ray's report on a process that died.
    `died` is True if the process died."""

    def __init__(self, name: str, reason: str, log: Path, details: str = "", *, died: bool = False) -> None:
        self.name, self.reason, self.log, self.details, self.died = name, reason, log, details, died
        super().__init__(f"{name} failed: {reason}")

    @classmethod
    def from_ray(cls, name: str, error: RayTaskError | RayActorError, log: Path) -> ActorError:
        """Returns the error of a call that ended with Ray's `error`."""
        if isinstance(error, RayTaskError):
            reason = add_location(f"{type(error.cause).__name__}: {error.cause}", str(error))
            return cls(name, reason, log, str(error))
        return cls(name, DIED, log, str(error), died=True)


_DEATH_S = 3.0  # after a first failure, the time for Ray to report a dead process
_CHECK_S = 1.0


def first_failure_or_all(
    config: Config,
    calls: dict[Ref, str],
    liveness: Mapping[Ref, str] = MappingProxyType({}),
    *,
    check: Callable[[], None] | None = None,
) -> list[Any]:
    """Waits for the calls (reference -> name of the actor) and returns their results in order. `liveness` has calls
    that end only with their actor.

    The first call that fails raises ActorError at once, because its peers may still wait for it in a collective. If a
    peer died, the ActorError names that peer. Its death breaks the collective, and the other ranks may report the
    broken collective first. `check` is called after each second without a result. An exception of `check` ends the
    wait.
    """
    waiting, names = [*calls, *liveness], {**liveness, **calls}
    results: dict[Ref, Any] = {}
    while len(results) < len(calls):
        every_s = None if check is None else _CHECK_S
        ended, waiting = ray.wait(waiting, timeout=every_s)  # ok: the call also ends if its actor dies
        if not ended and check is not None:
            check()
            continue
        (done,) = ended
        try:
            results[done] = ray.get(done)
        except RayActorError as error:
            raise ActorError.from_ray(names[done], error, log_path(config, names[done])) from None
        except RayTaskError as error:
            failed, why = _death_among(waiting) or (done, error)
            raise ActorError.from_ray(names[failed], why, log_path(config, names[failed])) from None
    return [results[ref] for ref in calls]


def _death_among(waiting: list[Ref]) -> tuple[Ref, RayActorError] | None:
    """Returns the first call whose actor Ray reports as dead within _DEATH_S seconds, with Ray's error, or None."""
    end = time.monotonic() + _DEATH_S
    while waiting and (left_s := end - time.monotonic()) > 0:
        ended, waiting = ray.wait(waiting, num_returns=1, timeout=left_s)
        for ref in ended:
            try:
                ray.get(ref)
            except RayActorError as error:
                return ref, error
            except RayTaskError:
                pass  # this actor is alive, and also lost its peer
    return None


def ask_progress(actor: Actor) -> tuple[int, int]:
    """Returns the progress of an actor, or (0, 0) for a dead actor, whose running call reports the reason."""
    try:
        call: ray.ObjectRef[tuple[int, int]] = actor.progress.remote()
        return ray.get(call, timeout=5)
    except (RayError, GetTimeoutError):
        return 0, 0
