"""Import path of slime plug-ins: see slime.http."""

import socket

from slime.http import get, post

__all__ = ["get", "get_host_info", "post"]


def get_host_info() -> tuple[str, str]:
    """(name, IPv4 address) of this host, for a server that a plug-in starts: the address of the interface that leads
    out, and 127.0.0.1 on a host without one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                ("192.0.2.1", 9)
            )  # an address of documentation (RFC 5737): only the route is looked up
        except OSError:
            return socket.gethostname(), "127.0.0.1"
        return socket.gethostname(), probe.getsockname()[0]
