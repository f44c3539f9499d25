"""`python -m vime.vllm.serve MODULE FLAGS...`: runs MODULE, a server of vLLM or for vLLM, as `python -m MODULE` would.

The garbage collector is off until vLLM loads our plug-in, so imports take a fifth less time. A server that receives a
signal to end exits at once. Otherwise Python would free its objects one by one, which takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import sys

from vime.vllm.cpu.memory import uncompiled

if __name__ == "__main__":
    gc.disable()  # vime.vllm.worker.plugin switches it on
    del sys.argv[0]
    try:
        with uncompiled():
            import vllm  # noqa: F401
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except BaseException:
        # Frozen objects are never collected: Triton would list them after the error that ended the server.
        gc.unfreeze()
        raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
