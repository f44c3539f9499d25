"""Finds the cause of a failed start in the log of a server.

vLLM's engine core logs the cause. Afterwards its API server logs a traceback that only reports a failed engine core.
"""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^(?:\([^)]*\) ?)*(?:(?:ERROR|CRITICAL|WARNING|INFO) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
"""vLLM's prefix of a log line: (EngineCore pid=7) ERROR 11-25 10:00:00 [core.py:1100]"""
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit): .+")
_FOLLOWS = re.compile(
    r"engine core initialization failed|engine core proc|worker.* initialization failed|workerproc|"
    r"process .*(?:died|failed)|see (?:root cause|stack trace)",
    re.IGNORECASE,
)
"""Errors that only report the failure of another process."""
_LISTED = re.compile(r"validation errors? for \w+$")
"""Pydantic's first line. The next lines hold the fields and their errors."""
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


def first_error(log: str) -> str | None:
    """Returns the first error in `log` that is not a consequence of another process's error, as one line, with the
    remedy if one is known. Returns None without an error."""
    plain = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    errors = [_whole(plain, i) for i, line in enumerate(plain) if _ERROR.match(line)]
    if not errors:
        return None
    cause = next((error for error in errors if not _FOLLOWS.search(error)), errors[0])
    remedy = next((text for pattern, text in _REMEDIES if re.search(pattern, cause)), None)
    return cause if remedy is None else f"{cause.rstrip('.')}; {remedy}"


def _whole(lines: list[str], i: int) -> str:
    """Returns the error that begins on line i. For a list of pydantic's errors it adds the first entry."""
    if not _LISTED.search(lines[i]):
        return lines[i]
    return ": ".join(
        [lines[i], *(line for line in lines[i + 1 : i + 3] if line and not line.startswith("For further"))]
    )
