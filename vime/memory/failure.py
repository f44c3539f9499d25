"""Explains the end of a run by lack of memory: the phase, the processes that used the memory, and the flags to change,
with numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime.checkpoints.hf_config import read_hf_config
from slime.cluster.calls import ActorError
from slime.cluster.memory_watch import HostMemoryError, MemoryWatch
from slime.config import Config
from slime.memory.card_text import card_lines
from slime.memory.host import HostMemory, kills
from slime.memory.peaks import Peaks
from slime.plan.advice import advise
from slime.plan.fit import DOING, MachineSizes, fit
from slime.plan.host_phases import USABLE
from slime.plan.units import GIB, amount

MEMORY_ERROR = re.compile(
    r"out of (device )?memory|OutOfMemory|MemoryError|Cannot allocate memory|"
    r"Cuda failure 2|killed",
    re.IGNORECASE,
)
"""Matches the text of an error that lack of memory may have caused."""
_MISSING = 0.05
"""Part of a host's memory that flags should free if the missing amount is unknown."""
_SHOWN = 5


def full_host(config: Config) -> Callable[[Peaks, HostMemory], str]:
    """Returns the function with which the memory watch explains why it ends the run."""

    def explain(peaks: Peaks, host: HostMemory) -> str:
        first = (
            f"the run must leave memory of the host free, got {amount(host.used)} in use of the {amount(host.total)} "
            f"of {host.limit} ({host.share:.1%}, without page cache) while {DOING[peaks.phase]}; vime has ended the "
            "run before a process is killed"
        )
        return "\n".join([first, *_host_processes(peaks), *_host_flags(config, host)])

    return explain


@contextmanager
def explained(config: Config, watch: MemoryWatch) -> Iterator[None]:
    """Adds memory facts to an error of the block that lack of memory may have caused.

    The facts are the last measurements, and whether the kernel has killed a process for memory since the run began.
    """
    before = kills()
    try:
        yield
    except RuntimeError as error:
        killed = kills() - before
        if isinstance(error, HostMemoryError) or not _may_come_from_memory(error):
            raise
        text = "\n".join(_report(config, watch, killed))
        error.args = (f"{error}\n{text}", *error.args[1:])
        raise


def _may_come_from_memory(error: RuntimeError) -> bool:
    return (isinstance(error, ActorError) and error.died) or MEMORY_ERROR.search(str(error)) is not None


def _report(config: Config, watch: MemoryWatch, killed: int) -> Iterator[str]:
    peaks, roles = watch.now, watch.roles
    yield f"memory while {DOING[peaks.phase]}, at its largest:"
    yield from card_lines([card for card, _ in peaks.cards.values()], roles)
    if peaks.host is not None:
        yield (
            f"host: {amount(peaks.host.used)} of the {amount(peaks.host.total)} of {peaks.host.limit} in use, without "
            f"page cache; {amount(peaks.shared_memory)} in /dev/shm"
        )
    yield from _host_processes(peaks)
    if killed > 0:
        yield f"the kernel has killed {killed} process{'es' * (killed > 1)} for memory since the run began (see dmesg)"
        if peaks.host is not None:
            yield from _host_flags(config, peaks.host)


def _host_processes(peaks: Peaks) -> Iterator[str]:
    """Yields the processes with the most private memory."""
    by_size = sorted(peaks.processes.items(), key=lambda pair: -pair[1].anonymous)[:_SHOWN]
    shown = [f"{role} {amount(memory.anonymous)}" for role, memory in by_size]
    if shown:
        yield f"memory of processes: {', '.join(shown)}; {amount(peaks.shared_memory)} in /dev/shm"


def _host_flags(config: Config, host: HostMemory) -> Iterator[str]:
    """Yields the flags that would free a part of the host, as the plan computes it for a host that is too small by this
    part."""
    hf = read_hf_config(config.rollout.hf_checkpoint)
    planned = fit(config, hf, MachineSizes()).host
    if planned is None:
        return
    most = planned.sum_phase(planned.worst)
    found = advise(config, hf, MachineSizes(host=(most - _MISSING * host.total) / USABLE))
    flags = [f"{one.change.flag} (now {one.change.now}) gives {amount(one.saved_bytes)}" for one in found]
    yield "what lowers it: " + (
        "; ".join(flags) or f"no single flag; the plan of this run needs {most / GIB:.1f} GiB"
    )
