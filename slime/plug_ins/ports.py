"""Free ports of this host, and the engines behind the router, for servers and clients of a plug-in. slime's http_utils
and misc have these names."""

from __future__ import annotations

import socket

from slime.config.schema import Config

_LAST = 65535


def is_port_available(port: int) -> bool:
    """Returns True if a server of this process could listen on the port, on all addresses of the host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
            one.listen(1)
        except OSError:
            return False
    return True


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Returns the first port from `start_port` on that begins `consecutive` free ports. Raises ValueError without one.

    Another process may take the port before the plug-in does. A server that binds port 0 has no such race.
    """
    for port in range(start_port, _LAST + 2 - consecutive):
        if all(is_port_available(port + i) for i in range(consecutive)):
            return port
    raise ValueError(
        f"start_port must be below {consecutive} consecutive free ports, got {start_port}; start at a smaller port"
    )


def find_available_port(base_port: int) -> int:
    """Returns the first free port from `base_port` on, see `get_free_port`."""
    return get_free_port(base_port)


def get_rollout_num_engines(args: object) -> int:
    """Returns the number of engines of the trained model, at least 1, from the flags in a plug-in's `args`."""
    return max(1, Config.from_args(args).num_engines)


def init_http_client(args: object) -> None:
    """Has no work to do: `post` and `get` open the client of an event loop at its first request."""
