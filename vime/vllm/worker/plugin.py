"""The plug-in that vLLM loads from the entry point `vllm.general_plugins`: registers the weight receiver, and installs
the changes to vLLM that runs need.

vLLM loads it in each process that it starts. A process that is forked from a server has it already. The driver, which
has no torch, reads the names below, so `register` does the imports.
"""

from __future__ import annotations

import gc
import os

BACKEND = "vime"
SUPERVISED_VARIABLE = "VIME_SUPERVISED"


def register() -> None:
    """Register the backend of `--weight-transfer-config {"backend": "vime"}`. May be called more than once.

    In a supervised server, each process also ends when the process that started it ends: without that, vLLM's engine
    process would survive a kill -9 of the supervisor. Requests may then ask for compact log-probs. Variables of the
    server's environment turn on routed experts, scaled logits, a shared GPU and the trainer's operators.
    """
    from vime.pool.supervise import die_with_parent, forks_die_with_parent
    from vime.vllm.cpu import draft as cpu_draft
    from vime.vllm.cpu import engine as cpu_engine
    from vime.vllm.cpu import experts as cpu_experts
    from vime.vllm.cpu import fp8 as cpu_fp8
    from vime.vllm.cpu import memory as cpu_memory
    from vime.vllm.cpu import rotary as cpu_rotary
    from vime.vllm.cpu import vision as cpu_vision
    from vime.vllm.versions import meet_in_a_file, register_backend
    from vime.vllm.worker import (
        bitwise,
        compact_log_probs,
        draft,
        merged_log_probs,
        routed_experts,
        scaled_logits,
        shared_gpu,
    )

    if SUPERVISED_VARIABLE in os.environ:
        gc.freeze()
        gc.enable()  # see vime.vllm.serve
        die_with_parent()
        forks_die_with_parent()
        compact_log_probs.install()
        merged_log_probs.install()
        meet_in_a_file()
        cpu_engine.install()
        cpu_memory.install()
    cpu_rotary.install()
    cpu_experts.install()
    cpu_draft.install()
    cpu_fp8.install()
    cpu_vision.install()
    if routed_experts.VARIABLE in os.environ:
        routed_experts.install()
    if (temperature := os.environ.get(scaled_logits.VARIABLE)) is not None:
        scaled_logits.install(float(temperature))
    gate, sleeps = os.environ.get(shared_gpu.GATE_VARIABLE), shared_gpu.SLEEPS_VARIABLE in os.environ
    if gate is not None or sleeps:
        shared_gpu.install(gate, sleeps=sleeps)
    if bitwise.wanted():
        bitwise.install()
    draft.install()
    register_backend(BACKEND, "vime.vllm.worker.weight_receiver", "VimeWeightTransferEngine")
