"""Implements the plug-in that vLLM loads from the entry point `vllm.general_plugins`: registers the weight receiver,
and prepares the processes of a server that a run started.

vLLM loads the plug-in in each process that it starts. In other programs' servers, it only registers the receiver. A
process that is forked from a server has already loaded it. The driver, which has no torch, reads the names below, so
`register` does the imports.
"""

from __future__ import annotations

import gc
import os

BACKEND = "vime"
SUPERVISED_VARIABLE = "VIME_SUPERVISED"
"""Name of the variable that a run sets in the environment of its servers."""


def register() -> None:
    """Registers the backend of `--weight-transfer-config {"backend": "vime"}`. Repeated calls are allowed.

    In a server of a run, each process also ends when the process that started it ends. Otherwise vLLM's engine process
    would survive a kill -9 of the supervisor. The patches of a server are applied (vime.vllm.patches). Workers apply
    their own patches, see vime.vllm.worker.workers.
    """
    from vime.vllm.versions import register_backend

    register_backend(BACKEND, "vime.vllm.worker.weight_receiver", "VimeWeightTransferEngine")
    if SUPERVISED_VARIABLE not in os.environ:
        return
    from vllm.platforms import current_platform

    from slime.bridges.processors import allow_no_torchvision
    from vime.pool.supervise import die_with_parent, forks_die_with_parent
    from vime.vllm import patches

    gc.freeze()
    gc.enable()  # see vime.vllm.serve
    die_with_parent()
    forks_die_with_parent()
    patches.apply("server")
    if current_platform.is_cpu():
        patches.apply("server on CPUs")
        allow_no_torchvision()
