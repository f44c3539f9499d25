"""What counts as a secret (keys, tokens, passwords, logins in addresses), and its masking in what a run writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

MASK = "***"
# Words in the name of a variable, flag or config entry that mark a secret.
_SECRET_WORDS = frozenset({"secret", "password", "passwd", "passphrase", "credential", "credentials"})
_SECRET_KEYS = (
    "api_key",
    "apikey",
    "run_key",
    "wandb_key",
    "access_key",
    "private_key",
    "secret_key",
    "encryption_key",
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether a variable, flag or config entry with this name holds a secret (API key, token, password).

    Only whole words count: --input-key, --rollout-stop-token-ids and --max-tokens-per-gpu are no secrets.
    """
    words = re.split(r"[-_.\s]+", name.strip("-").lower())
    if words[-1] == "token" or _SECRET_WORDS.intersection(words):
        return True
    return "_".join(words).endswith(_SECRET_KEYS)


def mask_secrets(value: object) -> object:
    """A copy of plain data (dicts, lists, strings, numbers) with secrets replaced by `***`.

    Masks entries whose key is the name of a secret, the login part of URLs, and both of these inside strings that
    hold a JSON object (such as the value of --train-env-vars).
    """
    if isinstance(value, Mapping):
        return {
            key: MASK if is_secret(str(key)) and item is not None else mask_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return json.dumps(mask_secrets(json.loads(value)))
        except ValueError:
            pass  # a brace in plain text, not JSON
    return _URL_LOGIN.sub(MASK, value)
