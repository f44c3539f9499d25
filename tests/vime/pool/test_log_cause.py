"""Finds the line of a server's log that is the cause of its end, with its remedy. The lines are those of vLLM 0.32's
logs."""

from __future__ import annotations

import pytest

from vime.pool.log_cause import first_error

CORE = "(EngineCore pid=7) ERROR 11-25 10:58:12 [core.py:1187] "
WORKER = "(Worker_TP0 pid=9) ERROR 11-25 10:58:11 [multiproc_executor.py:870] "
API = "(APIServer pid=5) "


def log(cause: str, prefix: str = CORE) -> str:
    return "\n".join(
        [
            "(EngineCore pid=7) INFO 11-25 10:58:01 [core.py:101] Initializing a V1 LLM engine",
            f"{prefix}EngineCore failed to start.",
            f"{prefix}Traceback (most recent call last):",
            f'{prefix}  File "core.py", line 1, in run',
            f"{prefix}{cause}",
            f"{CORE}Exception: WorkerProc initialization failed due to an exception in a background process.",
            f"{API}Traceback (most recent call last):",
            f"{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}",
        ]
    )


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("ValueError: VLLM_PORT 'tcp://10.0.0.1:80' appears to be a URI. This may be", "unset VLLM_PORT"),
        ("ValueError: No available memory for the cache blocks.", "raise --vllm-gpu-memory-utilization"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "lower --vllm-gpu-memory-utilization or",
        ),
        ("ValueError: Free memory on device (3.2/79.1 GiB) on startup is less", "end the other processes"),
        ("KeyError: 'layers.0.weight'", ""),
    ],
)
@pytest.mark.parametrize("prefix", [CORE, WORKER, ""])
def test_the_first_error_that_is_no_consequence(cause, remedy, prefix):
    found = first_error(log(cause, prefix))
    assert found is not None and found.startswith(cause.rstrip(".")) and remedy in found
    assert (";" in found) == bool(remedy) and "\n" not in found


def test_a_log_without_a_cause():
    assert first_error("INFO nothing: fine\nan Error without its text\n") is None
    alone = "RuntimeError: Engine core initialization failed. See root cause above."
    assert first_error(f"(APIServer pid=5) {alone}") == alone


def test_a_list_of_pydantic_gives_its_first_entry():
    log = """
(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=7)   Value error, User-specified max_model_len (1000000) is greater than the derived max_model_len.
(APIServer pid=7)     For further information visit https://errors.pydantic.dev/2/v/value_error
"""
    assert first_error(log) == (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig: Value error, User-specified "
        "max_model_len (1000000) is greater than the derived max_model_len."
    )
