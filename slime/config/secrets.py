"""Recognises secrets (keys, tokens, passwords, logins in addresses), and masks them in the output of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

MASK = "***"
# A name with one of these words anywhere holds a secret, also NCCL_PASSWORD_FILE.
_ANYWHERE = frozenset(
    {
        "secret",
        "secrets",
        "password",
        "passwords",
        "passwd",
        "passphrase",
        "passcode",
        "credential",
        "credentials",
    }
)
# A name that ends in one of these words holds a secret.
_KEYS = frozenset({"key", "keys", "token", "tokens"})
_LAST = _KEYS | {
    *("pass", "pwd", "auth", "authorization", "pat", "pats", "cookie", "cookies", "creds", "cred"),
    *("bearer", "jwt", "sig", "signature", "sas", "pin", "otp", "auths", "oauth", "webhook"),
}
# Words without a separator inside, such as apikey, hftoken and dbpassword.
_ENDS = (
    "password",
    "passwd",
    "secret",
    "token",
    "apikey",
    "accesskey",
    "secretkey",
    "privatekey",
    "runkey",
    "authkey",
)
# Words before "key" or "token" in a name that is not a secret: a column of the data, an index of a table, a token of a
# tokenizer.
_OF_DATA = frozenset(
    {
        *(
            "input",
            "label",
            "reward",
            "tool",
            "chosen",
            "rejected",
            "metadata",
            "multimodal",
            "teacher",
            "step",
        ),
        *("sort", "group", "primary", "foreign", "public", "cache", "partition", "image", "video", "audio"),
        *("eos", "bos", "pad", "unk", "mask", "sep", "cls", "stop", "start", "end", "special", "think"),
        *("max", "min", "num", "n", "new", "total", "batched", "prompt", "response", "completion", "output"),
        *("thinking", "reasoning", "budget", "draft", "speculative", "prefill", "decode", "kept", "top"),
    }
)
_SHELL = frozenset({"PWD", "OLDPWD"})
"""Variables of a shell with its working directory."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s?#\"']+(?=@)")
_NAME = r"[A-Za-z_][\w.\-]{0,99}"
_Entry = tuple[re.Pattern[str], re.Pattern[str]]
"""Pattern of a name, and pattern of the value after it."""
_QUOTED: _Entry = (  # as JSON and Python write entries in a longer text
    re.compile(rf"(?P<quote>[\"'])(?P<name>{_NAME})(?P=quote)\s{{0,9}}[:=]\s{{0,9}}"),
    re.compile(r"\"(?:\\.|[^\"\\])*|'(?:\\.|[^'\\])*"),
)
_ASSIGNED: _Entry = (  # in an address, in a shell command, in a connection string
    re.compile(rf"(?<![\w.\-])-{{0,2}}(?P<name>{_NAME})[ \t]{{0,3}}=(?!=)[ \t]{{0,3}}"),
    re.compile(r"\"[^\"]*|'[^']*|[^&;\s\"'#)}\]]+"),
)
_HEADER: _Entry = (
    re.compile(rf"(?<![\w.\-])(?P<name>{_NAME}):[ \t]{{0,9}}"),
    re.compile(r"[^\s\"'][^\r\n\"']*"),
)
_FLAG: _Entry = (  # matches a value, but not the next word of a sentence about the flag
    re.compile(rf"(?<![\w\-])--(?P<name>{_NAME})[ \t]{{1,9}}"),
    re.compile(r"\"[^\"]*|'[^']*|(?=[^\s\"']{0,99}\d|[^\s\"']{16})[^\s\"'\-][^\s\"']*"),
)
_WORD = re.compile(r"[^\s\"']+")
_BEARER = re.compile(r"(?<!\w)(?P<head>Bearer(?:\s+|%20))(?P<value>[^\s\"',;)}\]]+)", re.IGNORECASE)
# Tokens that can be recognised without a name: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, JWT.
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_\-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w\-]{16,}|xox[abprs]-[\w\-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w\-]{30,}"
    r"|eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*)"
)
_HEADERS = frozenset({"authorization", "auth", "cookie", "cookies"})
_PROSE = _LAST - _HEADERS - {"token", "pwd", "creds", "cred", "bearer", "jwt", "otp"}
"""Words that, alone before a colon, are part of a sentence: "the key: question"."""


def is_secret(name: str) -> bool:
    """Returns True if a variable, flag or config entry with this name holds a secret (API key, token, password).

    Only whole words count. A key that names a column (--input-key) and a number or kind of tokens
    (--max-tokens-per-gpu, eos_token) are not secrets.
    """
    if name in _SHELL:
        return False
    words = [word for word in re.split(r"[^A-Za-z0-9]+", _CAMEL.sub("_", name).lower()) if word]
    if _ANYWHERE.intersection(words):
        return True
    while words and words[-1].isdecimal():
        words.pop()  # OPENAI_API_KEY_2
    if words[-1:] in (["header"], ["headers"]):
        words.pop()  # auth_header
    last = words[-1].rstrip("0123456789") if words else ""
    if last not in _LAST:
        return last.endswith(_ENDS)
    return not (last in _KEYS and len(words) > 1 and words[-2] in _OF_DATA)


def mask_secrets(value: object) -> object:
    """Returns a copy of plain data (dicts, lists, strings, numbers) with secrets replaced by `***`.

    It masks entries whose key is the name of a secret, such entries in texts (JSON, addresses, assignments, headers),
    the login of addresses, `Bearer x`, and tokens of known forms.
    """
    if isinstance(value, Mapping):
        named = value.get("name", value.get("key"))
        return {
            _text(key) if isinstance(key, str) else key: MASK
            if _holds(str(key), item) or (key == "value" and isinstance(named, str) and _holds(named, item))
            else mask_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str) and _holds(value[0], value[1]):
            return [value[0], MASK]  # a header in the form of HTTP clients
        if all(isinstance(item, str) for item in value):
            return mask_command(value)
        return [mask_secrets(item) for item in value]
    return _text(value) if isinstance(value, str) else value


def mask_command(argv: Sequence[str]) -> list[str]:
    """Returns a command line with secret values masked in `--flag value`, `--flag=value` and `NAME=value`."""
    out: list[str] = []
    after_secret = False
    for word in argv:
        name, equals, content = word.partition("=")
        is_name = re.fullmatch(rf"-{{0,2}}{_NAME}", name) is not None
        if after_secret and not word.startswith("--"):
            out.append(MASK)
        elif equals and is_name:
            out.append(f"{name}={MASK if _holds(name, content) else _text(content)}")
        else:
            out.append(_text(word))
        after_secret = word.startswith("-") and not equals and is_secret(word)
    return out


def without(value: object, secrets: Iterable[str]) -> object:
    """Returns a copy of plain data in which these texts are masked everywhere."""
    if isinstance(value, Mapping):
        return {key: without(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [without(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
    return value


def _holds(name: str, value: object) -> bool:
    """Returns True if an entry holds a secret: by its name, unless its value cannot be one."""
    if value is None or isinstance(value, bool) or value == "" or not is_secret(name):
        return False
    plain = name.lower()
    if plain.endswith(("keys", "tokens")):
        return not _counts(value)
    return not (plain.endswith(("key", "token")) and isinstance(value, int | float))


def _counts(value: object) -> bool:
    """Returns True if a value is a count or an index of keys or tokens: 4096, "4096", [1, 2]."""
    if isinstance(value, list | tuple):
        return all(_counts(item) for item in value)
    return isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal() and len(value) < 8)


def _text(text: str) -> str:
    """Returns a text with its secrets masked."""
    if text.lstrip().startswith(("{", "[")):
        try:
            content = json.loads(text)
            if (masked := mask_secrets(content)) != content:
                return json.dumps(masked)
        except (ValueError, RecursionError):
            pass  # a bracket in plain text, not JSON
    for pattern in (_URL_LOGIN, _KNOWN):
        text = pattern.sub(MASK, text)
    text = _BEARER.sub(rf"\g<head>{MASK}", text)
    for entry in (_QUOTED, _ASSIGNED, _HEADER, _FLAG):
        text = _without_values(text, entry)
    return text


def _without_values(text: str, entry: _Entry) -> str:
    """Masks the values of secret entries. In a login header, the value is the rest of the line. After another name with
    a colon, it is one word."""
    names, values = entry
    out, at = "", 0
    for found in names.finditer(text):
        name = found["name"]
        if found.start() < at or not is_secret(name) or (entry is _HEADER and name.lower() in _PROSE):
            continue
        is_line = re.split(r"[-_]", name.lower())[-1] in _HEADERS
        value = (values if is_line or entry is not _HEADER else _WORD).match(text, found.end())
        if value is None or not _holds(name, value[0].strip("\"'")):
            continue
        mark = value[0][0] if value[0][0] in "\"'" else ""
        out += text[at : found.end()] + mark + MASK
        at = found.end() + len(value[0])
    return out + text[at:]
