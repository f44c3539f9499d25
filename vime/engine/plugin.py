"""What vLLM loads from the `vllm.general_plugins` entry point, in every process of an engine server that is not forked
from one that has."""

from __future__ import annotations

import gc
import os

from vime.engine import (
    compact_log_probs,
    cpu_draft,
    cpu_engine,
    cpu_experts,
    cpu_fp8,
    cpu_rotary,
    cpu_vision,
    draft,
    merged_log_probs,
    routed_experts,
    shared_gpu,
)
from vime.engine.supervise import die_with_parent, forks_die_with_parent
from vime.engine.vllm_versions import meet_in_a_file, register_backend

BACKEND = "vime"
SUPERVISED_VARIABLE = "VIME_SUPERVISED"


def register() -> None:
    """Make `--weight-transfer-config {"backend": "vime"}` known to vLLM. May run more than once a process.

    In a supervised server, also tie each of its processes to the one that started it (vLLM's engine process would
    otherwise outlive a kill -9 of the supervisor), and let requests ask for compact log-probs. Where the server's
    environment says so, also hand out routed experts, and share a GPU.
    """
    if SUPERVISED_VARIABLE in os.environ:
        gc.freeze()
        gc.enable()  # see vime.engine.serve
        die_with_parent()
        forks_die_with_parent()
        compact_log_probs.install()
        merged_log_probs.install()
        meet_in_a_file()
        cpu_engine.install()
    cpu_rotary.install()
    cpu_experts.install()
    cpu_draft.install()
    cpu_fp8.install()
    cpu_vision.install()
    if routed_experts.VARIABLE in os.environ:
        routed_experts.install()
    gate, sleeps = os.environ.get(shared_gpu.GATE_VARIABLE), shared_gpu.SLEEPS_VARIABLE in os.environ
    if gate is not None or sleeps:
        shared_gpu.install(gate, sleeps=sleeps)
    draft.install()
    register_backend(BACKEND, "vime.engine.weight_receiver", "VimeWeightTransferEngine")
