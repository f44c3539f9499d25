"""Child process of math_equal.py: compares two answers per line of standard input.

Run by path; imports nothing of slime. Protocol: prints "ready" once, then for each JSON line {"gold": str,
"answer": str} one line "1" or "0". The limits are the kernel's: SymPy can spend hours inside one big-integer
operation, where no Python signal handler runs, so CPU time beyond the limit ends the process (SIGXCPU) and
memory beyond it raises MemoryError. Answers are read as LaTeX only: math-verify's plain-expression reader
ends in `eval`, which model output must not reach.
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
    os.dup2(2, 1)  # a library that prints must not write into the protocol
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    _limit(resource.RLIMIT_AS, _MEMORY_LIMIT_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    how = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(answer: str) -> list:
        return parse(f"\\boxed{{{answer}}}", how, parsing_timeout=None)  # ok: bounded by RLIMIT_CPU

    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_limit_s)
        gold, answer = read(task["gold"]), read(task["answer"])
        equal = verify(gold, answer, timeout_seconds=None)  # ok: bounded by RLIMIT_CPU
        print(int(equal), file=replies, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
