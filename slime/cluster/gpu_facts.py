"""Reads the PCI bus address and the NVLink domain of a GPU of this node from `nvidia-smi`."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from slime.config.child_environment import without_secrets

_TIMEOUT_S = 60


@dataclass(frozen=True)
class GpuFacts:
    """Facts that the driver reports about a GPU. A value is "" if the driver does not report it."""

    bus: str = ""
    """PCI address as Linux writes it ("0000:00:06.0")."""
    domain: str = ""
    """Cluster and clique of the NVLink fabric. NVLink connects GPUs of the same domain."""


UNKNOWN = GpuFacts()


def read_gpu_facts(name: str) -> GpuFacts:
    """Returns the facts of the GPU `name`, an index or a UUID. Both facts are "" on a host without nvidia-smi."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q", "-i", name],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=without_secrets(),
        )
    except FileNotFoundError:
        return UNKNOWN
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"nvidia-smi -q -i {name} must answer within {_TIMEOUT_S} s, got no answer; check the driver of this node"
        ) from error
    if done.returncode:
        raise RuntimeError(
            f"nvidia-smi -q -i {name} must succeed, got exit status {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()}; check the driver of this node"
        )
    return parse(done.stdout)


def parse(text: str) -> GpuFacts:
    """Parses the facts from the output of `nvidia-smi -q` for one GPU."""
    bus = re.search(r"^GPU ([0-9A-Fa-f]+):([0-9A-Fa-f:.]+)$", text, re.M)
    fabric = text.partition("\n    Fabric\n")[2]
    joined = (_value(fabric, "State"), _value(fabric, "Status")) == ("Completed", "Success")
    cluster = _value(fabric, "ClusterUUID")
    known = joined and cluster.strip("0-") != ""  # zeros if NVLink does not leave the node
    return GpuFacts(
        bus=f"{bus[1][-4:]}:{bus[2]}".lower() if bus else "",
        domain=f"{cluster}.{_value(fabric, 'CliqueId')}" if known else "",
    )


def _value(text: str, key: str) -> str:
    found = re.search(rf"^\s+{key}\s*: (.*)$", text, re.M)
    return found[1].strip() if found else ""
