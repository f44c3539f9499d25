"""Child process of math_equal.py: compares two answers per line of standard input.

Started by its path. Imports nothing from slime. Protocol: prints "ready" once, then one line "1" or "0" for each
JSON line {"gold": str, "answer": str}. The kernel enforces the limits, because SymPy can spend hours inside one
big-integer operation, where no Python signal handler runs. CPU time above the limit ends the process (SIGXCPU),
and memory above the limit raises MemoryError. Answers are read as LaTeX only, because math-verify's reader of
plain expressions calls `eval`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time

_MEMORY_LIMIT_BYTES = 2 << 30


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main(cpu_limit_s: int) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output that a library prints must not reach the protocol
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    _limit(resource.RLIMIT_AS, _MEMORY_LIMIT_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    how = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(answer: str) -> list[object]:
        boxed = f"\\boxed{{{answer}}}"
        forms: list[object] = parse(boxed, how, parsing_timeout=None)  # ok: bounded by RLIMIT_CPU
        return forms

    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_limit_s)
        gold, answer = read(task["gold"]), read(task["answer"])
        equal = verify(gold, answer, timeout_seconds=None)  # ok: bounded by RLIMIT_CPU
        print(int(equal), file=replies, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
