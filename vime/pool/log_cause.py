"""Finds the cause of a failed start in the log of a server.

vLLM logs the cause in its engine core, and afterwards a traceback of its API server, which only says that the engine
core failed.
"""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^(?:\([^)]*\) ?)*(?:(?:ERROR|CRITICAL|WARNING|INFO) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
"""vLLM's own: (EngineCore pid=7) ERROR 11-25 10:00:00 [core.py:1100]"""
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit): .+")
_FOLLOWS = re.compile(
    r"engine core initialization failed|engine core proc|worker.* initialization failed|workerproc|"
    r"process .*(?:died|failed)|see (?:root cause|stack trace)",
    re.IGNORECASE,
)
"""Errors that only say that another process failed."""
_LISTED = re.compile(r"validation errors? for \w+$")
"""Pydantic's first line. The fields and what is wrong with them are on the lines after it."""
_REMEDIES = (
    (
        r"VLLM_PORT.*appears to be a URI",
        "unset VLLM_PORT: Kubernetes sets it for a service that is called vllm; rename the service, or set "
        "enableServiceLinks: false for the pod",
    ),
    (
        r"No available memory for the cache blocks|KV cache is needed|larger than the available KV cache",
        "raise --vllm-gpu-memory-utilization, or lower --vllm-max-model-len",
    ),
    (
        r"Free memory on device",
        "end the other processes on this GPU, or lower --vllm-gpu-memory-utilization",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError",
        "lower --vllm-gpu-memory-utilization or --vllm-max-num-seqs, or end the other processes on this GPU",
    ),
)


def cause_of(log: str) -> str | None:
    """The first error in `log` that is no consequence of another process's, in one line, with what to do if that is
    known. None without an error."""
    plain = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    errors = [_whole(plain, i) for i, line in enumerate(plain) if _ERROR.match(line)]
    if not errors:
        return None
    cause = next((error for error in errors if not _FOLLOWS.search(error)), errors[0])
    remedy = next((text for pattern, text in _REMEDIES if re.search(pattern, cause)), None)
    return cause if remedy is None else f"{cause.rstrip('.')}; {remedy}"


def _whole(lines: list[str], i: int) -> str:
    """The error that begins on line i. A list of pydantic's gives its first entry too."""
    if not _LISTED.search(lines[i]):
        return lines[i]
    return ": ".join(
        [lines[i], *(line for line in lines[i + 1 : i + 3] if line and not line.startswith("For further"))]
    )
