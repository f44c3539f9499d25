"""Every symbol that this project replaces in a server of SGLang."""

from __future__ import annotations

from slime.bridges import Patch

PROOF = Patch(
    symbol="uvicorn:Config.load",
    replacement="vime.sglang.serve:with_proof",
    condition="in the process of a server of SGLang",
    why="a server proves that it has the run's key before a client sends the key, and SGLang has no option for a "
    "middleware",
    removed_when="SGLang has an option for a middleware",
)
PATCHES = (PROOF,)
