"""`python -m vime.vllm.serve MODULE FLAGS...`: runs MODULE, a server of vLLM or for vLLM, as `python -m MODULE` would.

`python -m vime.vllm.serve --standby MODULES...` imports the modules, and then waits for an order of
`vime.pool.engine_server.Standby`: one line of JSON with the command line, the environment, the log file and the CPUs of
an engine. It then continues as this engine.

The garbage collector is off until vLLM loads our plug-in, so imports take a fifth less time. A server that receives a
signal to end exits at once. Otherwise Python would free its objects one by one, which takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import sys
import warnings
from collections.abc import Sequence

from vime.vllm.cpu.memory import uncompiled

STANDBY = "--standby"


def wait_for_order(modules: Sequence[str]) -> list[str]:
    """Imports the modules and waits. Returns the words of the ordered command after `python -m vime.vllm.serve`, once
    this process has the environment of the order. Ends the process if there is no order."""
    from setproctitle import getproctitle, setproctitle

    getproctitle()  # finds the memory of the title, for which the environment must be the first one
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    print("the imports are done; waiting for an engine to replace", flush=True)
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["env"])
    os.sched_setaffinity(0, order["cpus"])
    _redirect(0, os.devnull, os.O_RDONLY)
    for descriptor in (1, 2):
        _redirect(descriptor, order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    setproctitle(" ".join(order["command"]))
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # the imported server
    words: list[str] = order["command"]
    return words[words.index("vime.vllm.serve") + 1 :]


def _redirect(descriptor: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o644)
    os.dup2(opened, descriptor)
    os.close(opened)


if __name__ == "__main__":
    gc.disable()  # vime.vllm.worker.plugin switches it on
    del sys.argv[0]
    try:
        with uncompiled():
            import vllm  # noqa: F401
        if sys.argv[0] == STANDBY:
            sys.argv = wait_for_order(sys.argv[1:])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except BaseException:
        # Frozen objects are never collected: Triton would list them after the error that ended the server.
        gc.unfreeze()
        raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
