"""Two hosts on one machine: network namespaces with their own addresses, a link between them, and their own disks.

Each host has a mount namespace, in which a small disk is mounted at /tmp/ray. Ray writes its sockets, logs and spilled
objects there. All other folders are shared, like a network file system. The namespaces end with their first process, so
a killed test leaves none behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from train_fixtures import ROOT, reaper_of_orphans

PORT = 6379
RAY_FOLDER = Path("/tmp/ray")
DISK_MIB = 64
_HOLD = f"""
set -e
mkdir -p {RAY_FOLDER}
mount -t tmpfs -o size={DISK_MIB}m tmpfs {RAY_FOLDER}
ip link set lo up
echo ready
exec sleep infinity
"""


@dataclass
class Host:
    """A host. `holder` is the first process of its namespaces."""

    address: str
    interface: str
    holder: subprocess.Popen[str]

    @property
    def prefix(self) -> list[str]:
        """Returns the words before a command that runs on this host."""
        return ["nsenter", "--target", str(self.holder.pid), "--net", "--mount", "--"]

    def call(self, *words: str) -> str:
        return subprocess.run([*self.prefix, *words], check=True, capture_output=True, text=True).stdout

    @property
    def disk(self) -> Path:
        """Returns this host's disk, as a path of the machine."""
        return Path(f"/proc/{self.holder.pid}/root{RAY_FOLDER}")

    def processes(self) -> list[psutil.Process]:
        """Returns the processes of this host, without the first one."""
        own = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if process.pid != self.holder.pid and os.stat(f"/proc/{process.pid}/ns/net").st_ino == own:
                    found.append(process)
        return found

    def leave(self) -> None:
        """Kills all processes of this host, also those that start meanwhile."""
        while found := self.processes():
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.1)


@dataclass
class Hosts:
    """The first host runs the head of Ray and the driver. The second host is a worker node."""

    first: Host
    second: Host
    token: Path

    def ray(self, role: str, *flags: str) -> subprocess.Popen[bytes]:
        """Starts Ray on the host of a role, head or worker."""
        host = self.first if role == "head" else self.second
        variables = [f"TOKEN_FILE={self.token}", f"NODE_IP={host.address}", f"PYTHON={sys.executable}"]
        variables += [
            f"GLOO_SOCKET_IFNAME={host.interface}"
        ]  # gloo would use the address of the machine's name
        variables += [f"PORT={PORT}"] if role == "head" else [f"HEAD={self.first.address}:{PORT}"]
        words = ["env", *variables, "bash", str(ROOT / "scripts/ray-cluster.sh"), role, *flags]
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        with (self.token.parent / f"ray-{role}.log").open("wb") as log:
            return subprocess.Popen(
                [*host.prefix, *words], stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}
            )

    def command(self, words: list[str]) -> list[str]:
        """Returns a command of vime that joins the cluster, on the first host."""
        cluster = f"RAY_ADDRESS={self.first.address}:{PORT}"
        return [*self.first.prefix, "env", cluster, f"RAY_AUTH_TOKEN_PATH={self.token}", *words]

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """No packet passes between the hosts in this context."""
        self.first.call("ip", "link", "set", self.first.interface, "down")
        try:
            yield
        finally:
            self.first.call("ip", "link", "set", self.first.interface, "up")

    @contextlib.contextmanager
    def slow(self, rate: str) -> Iterator[None]:
        """Each direction of the link has at most `rate` in this context, such as "4mbit"."""
        for host in (self.first, self.second):
            shape = ["root", "tbf", "rate", rate, "burst", "32kbit", "latency", "2s"]
            host.call("tc", "qdisc", "add", "dev", host.interface, *shape)
        try:
            yield
        finally:
            for host in (self.first, self.second):
                host.call("tc", "qdisc", "del", "dev", host.interface, "root")


def find_obstacle() -> str | None:
    """Returns the reason why this machine cannot have network namespaces, or None."""
    if os.getuid() != 0:
        return "network namespaces need root"
    for words in (
        ["unshare", "--net", "--mount", "true"],
        ["unshare", "--net", "ip", "link", "add", "veth1", "type", "veth", "peer", "name", "veth2"],
    ):
        try:
            done = subprocess.run(words, capture_output=True, text=True)
        except FileNotFoundError as error:
            return str(error)
        if done.returncode:
            return f"{' '.join(words)}: {done.stderr.strip()}"
    return None


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Makes the hosts. At the end it kills all of their processes."""
    with reaper_of_orphans(), contextlib.ExitStack() as stack:
        hosts = []
        for number in (1, 2):
            words = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", _HOLD]
            holder = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            stack.callback(holder.kill)
            host = Host(f"10.77.0.{number}", f"veth{number}", holder)
            stack.callback(host.leave)
            assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
            hosts.append(host)
        first, second = hosts
        peer = ["peer", "name", second.interface, "netns", str(second.holder.pid)]
        first.call("ip", "link", "add", first.interface, "type", "veth", *peer)
        for host in hosts:
            host.call("ip", "address", "add", f"{host.address}/24", "dev", host.interface)
            host.call("ip", "link", "set", host.interface, "up")
        yield Hosts(first, second, folder / "token")
