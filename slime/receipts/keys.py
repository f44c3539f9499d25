"""Ed25519 keys in PEM files, as openssl writes them: the private key signs, the public key checks.

openssl genpkey -algorithm ed25519 -out key.pem
openssl pkey -in key.pem -pubout -out public.pem
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime.records.errors import FlagError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MAKE = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"


def read_private_key(path: str) -> Ed25519PrivateKey:
    """Returns the private key in a PEM file without a password. Raises ValueError for another file."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    found = _read(path, "--receipt-key", lambda content: load_pem_private_key(content, None))
    if not isinstance(found, Ed25519PrivateKey):
        raise FlagError("--receipt-key", "be an Ed25519 private key", type(found).__name__, _MAKE)
    return found


def read_public_key(path: str) -> str:
    """Returns the public key of a PEM file as hexadecimal text. A private key has its public key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    def load(content: bytes) -> object:
        if b"PRIVATE KEY" in content:
            return load_pem_private_key(content, None)
        return load_pem_public_key(content)

    found = _read(path, "--key", load)
    if isinstance(found, Ed25519PrivateKey):
        found = found.public_key()
    if not isinstance(found, Ed25519PublicKey):
        raise FlagError("--key", "be an Ed25519 key", type(found).__name__, _MAKE)
    return str(found.public_bytes_raw().hex())


def get_public(key: Ed25519PrivateKey) -> str:
    """Returns the public key as hexadecimal text."""
    return str(key.public_key().public_bytes_raw().hex())


def is_signed(public: str, digest: str, signature: str) -> bool:
    """Returns whether `signature` is that of `digest` by the key `public`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), bytes.fromhex(digest))
    except (InvalidSignature, ValueError):
        return False
    return True


def _read(path: str, flag: str, load: object) -> object:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise FlagError(flag, "name a readable PEM file", f"{path}: {error.strerror}", _MAKE) from error
    try:
        return load(content)  # type: ignore[operator]
    except (ValueError, TypeError) as error:
        raise FlagError(flag, "name a PEM file without a password", f"{path} ({error})", _MAKE) from error
