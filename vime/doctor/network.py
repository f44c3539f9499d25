"""Checks of the network: loopback ports, the Ray cluster to join, RDMA devices."""

from __future__ import annotations

import resource
import socket
from urllib.parse import urlsplit

from slime.cluster.ray_token import MODE, TOKEN, TOKEN_PATH, use_user_token
from slime.records.errors import FlagError
from vime.doctor.finding import GIB, Finding, WantedRun, judge, ok, problem, size, warning
from vime.doctor.machine import Machine, words

LOOPBACK = "127.0.0.1"
PORTS = 8  # engines, routers and Ray's services of a small run
CONNECT_TIMEOUT_S = 3


def check_loopback(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Binds a few free ports of the loopback interface, as engines and routers do."""
    open_sockets: list[socket.socket] = []
    try:
        for _ in range(PORTS):
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            open_sockets.append(held)
            held.bind((LOOPBACK, 0))
            held.listen()
        socket.create_connection(open_sockets[0].getsockname(), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        remedy = "bring the loopback interface up (ip link set lo up) and free some ports"
        return [problem("ports", f"{LOOPBACK} cannot be used: {error}", remedy)]
    finally:
        for held in open_sockets:
            held.close()
    return [ok("ports", f"{PORTS} free ports of {LOOPBACK} could be bound")]


def check_ray(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks the cluster at RAY_ADDRESS, which a run would join. The cluster must answer, and this user must have the
    token."""
    address = machine.environ.get("RAY_ADDRESS")
    if not address:
        return [ok("ray cluster", "RAY_ADDRESS is not set: a run starts Ray on this host")]
    if address in ("auto", "local"):
        return [
            ok("ray cluster", f"RAY_ADDRESS={address}: Ray looks for a cluster on this host"),
            _token(machine),
        ]
    url = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        return [
            problem(
                "ray cluster", f"RAY_ADDRESS={address} names no host and port", "set RAY_ADDRESS to HOST:6379"
            )
        ]
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        remedy = "start the head (ray start --head), open its port in the firewall, or unset RAY_ADDRESS"
        return [problem("ray cluster", f"{host}:{port} does not answer: {error}", remedy), _token(machine)]
    return [ok("ray cluster", f"{host}:{port} accepts connections"), _token(machine)]


def _token(machine: Machine) -> Finding:
    """Runs the token check that a run makes before it joins a cluster."""
    environ = dict(machine.environ)
    try:
        use_user_token(environ)
    except FlagError as error:
        # A user who turned authentication off may run with --allow-unauthenticated-ray.
        chosen = environ.get(MODE, "token") != "token"
        return judge("ray token", error.finding, error.advice, fails=not chosen, poor=True)
    return ok(
        "ray token",
        f"taken from {TOKEN if environ.get(TOKEN) else environ.get(TOKEN_PATH) or 'the home directory'}",
    )


def check_rdma(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks InfiniBand and RoCE devices. NCCL uses them between hosts if a port is active and memory can be locked."""
    devices = sorted(machine.path("/sys/class/infiniband").glob("*"))
    if not devices:
        return [ok("rdma", "no device: hosts exchange data over TCP")]
    states = {}
    for device in devices:
        for port in sorted((device / "ports").glob("*")):
            state = (port / "state").read_text(encoding="utf-8").strip().rpartition(": ")[2]
            rate = port / "rate"
            speed = rate.read_text(encoding="utf-8").strip() if rate.is_file() else "rate unknown"
            states[f"{device.name}:{port.name}"] = (state, speed)
    active = [f"{name} {speed}" for name, (state, speed) in states.items() if state == "ACTIVE"]
    down = [f"{name} {state}" for name, (state, _) in states.items() if state != "ACTIVE"]
    found = f"active: {words(active) or 'none'}" + (f"; not active: {words(down)}" if down else "")
    remedy = "check cable, subnet manager and driver (ibstat), or leave the port out with NCCL_IB_HCA"
    findings = [judge("rdma", found, remedy, fails=False, poor=bool(down) or not active)]
    if not machine.path("/dev/infiniband").is_dir():
        remedy = "docker run --device /dev/infiniband; in Kubernetes ask for the device plugin's resource"
        findings.append(warning("rdma access", "/dev/infiniband is missing, NCCL would use TCP", remedy))
    locked = machine.limit(resource.RLIMIT_MEMLOCK)[0]
    little = locked != resource.RLIM_INFINITY and locked < GIB
    found = "unlimited" if locked == resource.RLIM_INFINITY else size(locked)
    remedy = "RDMA locks memory: ulimit -l unlimited; docker run --ulimit memlock=-1"
    findings.append(judge("locked memory", found, remedy, fails=False, poor=little))
    return findings
