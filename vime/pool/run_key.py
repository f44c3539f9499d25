"""The run's key, which every route of every server needs: where a server finds it, and what is derived from it. And the
size of a request that a server accepts with it."""

from __future__ import annotations

import hashlib
import hmac

from slime.config.child_environment import RUN_KEY

KEY_VARIABLE = RUN_KEY
"""The environment variable that passes the key. It is never on a command line."""
LARGEST_BODY_BYTES = 128 << 20
"""The largest body that engines, routers and the gateway accept: a prompt of 10 million token ids, or 90 MiB of images.
"""


def health_prefix(run_key: str) -> str:
    """Path under which a router may ask for /health: "/" + the first 32 hex digits of HMAC-SHA256(key, "health")."""
    return "/" + hmac.new(run_key.encode(), b"health", hashlib.sha256).hexdigest()[:32]
