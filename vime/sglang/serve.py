"""`python -m vime.sglang.serve FLAGS...`: runs `python -m sglang.launch_server FLAGS --api-key KEY` in this process.

SGLang takes its key on the command line, which every user of the machine can read, and logs it with its settings. The
key comes from $VIME_RUN_KEY here, and the log shows asterisks.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys

from vime.pool.run_key import KEY_VARIABLE

MODULE = "sglang.launch_server"


def hide(secret: str) -> None:
    """Replace `secret` in all that this process logs."""
    make = logging.getLogRecordFactory()

    def hidden(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        message = record.getMessage()
        if secret in message:
            record.msg, record.args = message.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(hidden)


def main() -> None:
    """Serve until terminated."""
    run_key = os.environ[KEY_VARIABLE]
    hide(run_key)
    sys.argv += ["--api-key", run_key]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
