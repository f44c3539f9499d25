"""`vime engines list|add|remove RUN_DIR` shows a run's engines, and adds or removes engines during the run.

`list` reads the run's events, also for a run that has ended or is on another host. `add` and `remove` send a request to
the driver's socket (vime.members.control_socket), so they must be run on the driver's host by the driver's user.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
from collections.abc import Sequence
from pathlib import Path

from slime.roles.served import POLICY
from slime.tracking.run_engines import RunEngines
from vime.members.table import read_engines, table


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0, or 1 if the run could not serve the request. Raises ValueError for
    an error that the user can correct."""
    args = _parser().parse_args(argv)
    engines = read_engines(args.run_dir)
    if args.action == "list":
        return _list(engines)
    asked: dict[str, object] = {"do": args.action}
    if args.action == "add":
        if args.count < 1:
            raise ValueError(
                f"--count must be at least 1, got {args.count}; give the number of engines to start"
            )
        asked |= {"model": args.model, "count": args.count, "address": args.address}
    else:
        if args.wait_s < 0:
            raise ValueError(f"--wait-s must not be below 0, got {args.wait_s:g}; give seconds")
        asked |= {"engine": args.engine, "wait_s": args.wait_s}
    return _ask(engines, args.run_dir, asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vime engines", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    shown = actions.add_parser("list", help="a table of the engines of a running or ended run")
    add = actions.add_parser("add", help="start more engines, or add an external engine")
    remove = actions.add_parser("remove", help="let an engine finish its requests, and end it")
    for each in (shown, add, remove):
        each.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    how = add.add_mutually_exclusive_group()
    how.add_argument(
        "--count", type=int, default=1, help="number of engines to start on free devices (default 1)"
    )
    how.add_argument("--address", metavar="HOST:PORT", help="an engine of `vime serve engine`")
    add.add_argument("--model", default=POLICY, help="the served model that gets them (default policy)")
    remove.add_argument("engine", metavar="ENGINE", help="its name or its HOST:PORT")
    remove.add_argument(
        "--wait-s", type=float, default=60.0, help="seconds for its requests to end (default 60)"
    )
    return parser


def _list(engines: RunEngines) -> int:
    here = engines.host == socket.gethostname()
    control = _connect(engines) if here else None
    if control is not None:
        control.close()
    print(*table(engines, ended=here and control is None), sep="\n")
    if not here:
        print(
            f"the run's driver is process {engines.pid} on {engines.host}; run this command there to see its state"
        )
    return 0


def _connect(engines: RunEngines) -> socket.socket | None:
    """Returns a connection to the run's driver, or None if the run has ended."""
    control = socket.socket(socket.AF_UNIX)
    try:
        control.connect(engines.socket)
    except (FileNotFoundError, ConnectionRefusedError):
        control.close()
        return None
    except PermissionError as error:
        control.close()
        raise ValueError(
            f"vime engines must be run by the user of the run, got no permission for {engines.socket}; take that user"
        ) from error
    return control


def _ask(engines: RunEngines, run_dir: Path, asked: dict[str, object]) -> int:
    if engines.host != socket.gethostname():
        raise ValueError(
            f"vime engines {asked['do']} must be run on the host of the run's driver, {engines.host}, got "
            f"{socket.gethostname()}; log in there"
        )
    control = _connect(engines)
    if control is None:
        raise ValueError(
            f"RUN_DIR must belong to a running run, got {run_dir}, whose run has ended; resume it first"
        )
    with control, contextlib.suppress(ConnectionResetError):
        control.sendall(json.dumps(asked).encode() + b"\n")
        with control.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                ((kind, text),) = json.loads(line).items()
                if kind == "refused":
                    raise ValueError(text)
                print(f"vime engines: {text}" if kind == "failed" else text, flush=True)
                if kind != "say":
                    return int(kind == "failed")
    print("vime engines: the run ended before it answered", flush=True)
    return 1
