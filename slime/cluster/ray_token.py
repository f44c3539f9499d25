"""Controls the access to Ray: a cluster's token, the token's file, and a check that a cluster requires its token.

`python -m slime.cluster.ray_token FILE` checks a token file. With --make, it first writes the file if none exists.
"""

from __future__ import annotations

import argparse
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from slime.config.child_environment import without_secrets
from slime.peers.proof import strangers_at
from slime.records.errors import FlagError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_PROBE_TIMEOUT_S = 60
_PROBE = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=20)
except AuthenticationError:
    print("refused")
else:
    print("admitted")
"""


def make_token_file(path: Path) -> None:
    """Writes a new token to `path`. Only the file's owner can read it. Raises FileExistsError if the file exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))


def check_token_file(path: Path) -> None:
    """Raises ValueError unless `path` is a token file that belongs to this user or root, and no other user can read
    it."""
    if not path.is_file():
        raise FlagError(
            "the Ray token file",
            "exist",
            path,
            f"copy it from the head node, or make one with python -m slime.cluster.ray_token --make {path}",
        )
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise FlagError(
            "the Ray token file",
            "belong to this user or root",
            f"{path} of user {status.st_uid}",
            "make a new one",
        )
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise FlagError(
            "the Ray token file",
            "be closed to group and others (mode 600)",
            f"{path} with mode {stat.S_IMODE(status.st_mode):o}, {mode:o} too much",
            f"chmod 600 {path}, and make a new token if other users could read this one",
        )
    if not path.read_text(encoding="utf-8").strip():
        raise FlagError("the Ray token file", "hold a token", f"the empty file {path}", "remove it")


def use_own_token(environ: MutableMapping[str, str]) -> None:
    """Makes a new token for a cluster that this process starts. The cluster's processes inherit it in `environ`."""
    environ[MODE], environ[TOKEN] = "token", secrets.token_hex(32)


def use_user_token(environ: MutableMapping[str, str]) -> None:
    """Enables token mode if the user gave a token, in RAY_AUTH_TOKEN or in a file that passes `check_token_file`."""
    if environ.get(MODE, "token") != "token":
        raise FlagError(MODE, "be token", environ[MODE], "unset it, or give --allow-unauthenticated-ray")
    if not environ.get(TOKEN):
        path = Path(environ.get(TOKEN_PATH) or os.path.expanduser("~/.ray/auth_token"))
        if not environ.get(TOKEN_PATH) and not path.exists():
            raise FlagError(
                TOKEN_PATH,
                "name the file with the token of the cluster at RAY_ADDRESS",
                "none",
                f"export {MODE}=token and {TOKEN_PATH} before `ray start` on every node "
                "(docs/several-hosts.md), or give --allow-unauthenticated-ray",
            )
        check_token_file(path)
    environ[MODE] = "token"


def require_own_server(gcs_address: str) -> None:
    """Raises ValueError if another user of this host listens at the address, because that user would receive the
    token."""
    host, _, port = gcs_address.rpartition(":")
    if strangers := strangers_at(host.strip("[]"), int(port)):
        raise FlagError(
            f"the Ray cluster at {gcs_address}",
            "belong to this user or root",
            f"a process of user {strangers[0]}, which would get the token",
            "start the cluster as this user, or correct RAY_ADDRESS",
        )


def require_authentication(gcs_address: str) -> None:
    """Raises ValueError if the cluster accepts a client without a token. A process without a token tries to connect."""
    environ = {key: value for key, value in without_secrets().items() if not key.startswith("RAY_")}
    environ[MODE] = "disabled"
    command = [sys.executable, "-P", "-c", _PROBE, gcs_address]
    probe = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    answer = probe.stdout.strip()
    if answer == "admitted":
        raise FlagError(
            f"the Ray cluster at {gcs_address}",
            "ask for a token",
            "one that admits anyone, who can then run code on it",
            "start it with a token (docs/several-hosts.md), or give --allow-unauthenticated-ray",
        )
    if answer != "refused":
        raise RuntimeError(
            f"a client without a token must get an answer from {gcs_address}, got {probe.stderr[-1000:]}"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slime.cluster.ray_token", description="Check a token file."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--make", action="store_true", help="write a new token first if the file does not exist"
    )
    args = parser.parse_args(argv)
    try:
        if args.make and not args.file.exists():
            make_token_file(args.file)
        check_token_file(args.file)
    except (ValueError, OSError) as error:
        print(f"ray_token: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
