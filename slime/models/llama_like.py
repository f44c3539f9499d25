"""Models of a model_type without a file in slime/models/families, whose tensors are those of Llama.

`describe_tensors` recognises them by the names of their tensors, and `read` builds the decoder that names and
config.json describe. A setting that neither describes, such as a factor of the embeddings, is not seen here. Therefore
every run first compares a tiny model with transformers (vime.start.model_check).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.families import gemma3, olmo3
from slime.models.family import Family
from slime.models.layouts import Row
from slime.models.reading import alternating_windows, read_decoder, sliding_windows
from slime.models.rope import Rope, read_rope
from slime.models.rows import ATTENTION, ENDS, HEAD_NORMS, HF, IGNORED, MLP, NORMS, OUTPUT_BIAS

TENSORS = "tensors"
"""Key of `describe_tensors` in the config.json of a model_type without a family."""
LIKE = "like"
"""Key of the parts that a Llama-like model has, in the record of `describe_tensors`."""
NEAREST = "nearest"
"""Key of the families with the most equal names, in the record of `describe_tensors`. "" if no name is equal."""
Shapes = Mapping[str, tuple[int, ...]]
"""Name of a tensor -> its shape."""

FIRST_LAYER = tuple(f"{HF}self_attn.q_{part}.weight".format(i=0) for part in ("norm", "proj"))
"""Names of the norm of queries and of their product. Their shapes show whether the norm is of one head."""

_NAMED = 3
"""Most families that an error names."""
_LAYER = re.compile(r"\blayers\.\d+\.")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_HEAD = "lm_head.weight"
_OPTIONAL = {
    "qkv_bias": frozenset(f"{HF}self_attn.{x}_proj.bias" for x in "qkv"),
    "output_bias": frozenset(OUTPUT_BIAS.hf),
    "qk_norm": frozenset(name for row in HEAD_NORMS for name in row.hf),
}
"""Parts that a Llama-like model may have -> the names of their tensors."""
_ALWAYS = (
    frozenset(name for row in (*ENDS, *ATTENTION, *MLP) for name in row.hf) - _OPTIONAL["qkv_bias"] - {_HEAD}
)
_NORM_ROWS = {"before": NORMS, "after": olmo3.NORMS, "both": gemma3.NORMS}
"""Place of the norms of a layer -> their rows."""
_HEAD_ROWS: dict[str, tuple[Row, ...]] = {"": (), "head": HEAD_NORMS, "projection": olmo3.OF_ALL_HEADS}
"""`Decoder.qk_norm` -> the rows of the norms."""
_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
"""Function in config.json -> activation of the gated MLP."""


def describe_tensors(
    names: Iterable[str], shapes: Shapes, families: Mapping[str, Family]
) -> dict[str, object]:
    """Returns the record of a checkpoint's tensors, which `family_for` reads. `shapes` has those of `FIRST_LAYER` that
    the checkpoint has."""
    patterns = frozenset(_EXPERT.sub("experts.{e}.", _LAYER.sub("layers.{i}.", name)) for name in names)

    shared = {kind: _share(family, patterns) for kind, family in families.items() if not family.tower}
    most = max(shared.values())
    nearest = [kind for kind, share in shared.items() if share == most > 0]
    return {LIKE: _find_like(patterns, shapes), NEAREST: " and ".join(nearest[:_NAMED])}


def _share(family: Family, patterns: frozenset[str]) -> float:
    """Returns the share of equal names among all names. Biases that the checkpoint lacks do not count."""
    own = {name for row in family.rows for name in row.hf if name in patterns or not name.endswith(".bias")}
    return len(own & patterns) / len(own | patterns)


def _find_like(patterns: frozenset[str], shapes: Shapes) -> dict[str, object] | None:
    """Returns the parts of a Llama-like model with these names, or None for another model."""
    left = patterns - _ALWAYS - frozenset(IGNORED) - {_HEAD}
    has = {key: names <= left for key, names in _OPTIONAL.items()}
    left -= frozenset().union(*(names for key, names in _OPTIONAL.items() if has[key]))
    place = next(
        (key for key, rows in _NORM_ROWS.items() if left == {name for row in rows for name in row.hf}), None
    )
    if place is None or not patterns >= _ALWAYS:
        return None
    qk_norm = ""
    if has["qk_norm"]:
        norm, product = (shapes.get(name) for name in FIRST_LAYER)
        if norm is None or product is None:
            return None
        qk_norm = "projection" if norm[0] == product[0] else "head"
    return {
        "qkv_bias": has["qkv_bias"],
        "output_bias": has["output_bias"],
        "qk_norm": qk_norm,
        "norms": place,
    }


def like_family(hf: Hf) -> Family | None:
    """Returns the family of a Llama-like model of an unknown model_type, or None for another model."""
    like = (hf.get(TENSORS) or {}).get(LIKE)
    return None if like is None else _build(str(hf.get("model_type")), like["norms"], like["qk_norm"])


@functools.cache
def _build(model_type: str, norms: str, qk_norm: str) -> Family:
    rows = (*ENDS, *_NORM_ROWS[norms], *ATTENTION, OUTPUT_BIAS, *_HEAD_ROWS[qk_norm], *MLP)
    return Family(model_type, f"{model_type}, like Llama", "", rows, read, ignored=IGNORED)


def read(hf: Hf) -> Decoder:
    """Returns the decoder. Raises ValueError for settings that no Llama-like model has here."""
    like = hf[TENSORS][LIKE]
    function = hf.get("hidden_act") or hf.get("hidden_activation") or "silu"
    if function not in _ACTIVATIONS:
        raise ValueError(
            f"hidden_act in config.json must be {' or '.join(_ACTIVATIONS)} for a model like Llama, got {function}; "
            "docs/adding-a-model.md shows how to add a family"
        )
    decoder = read_decoder(
        hf,
        qkv_bias=like["qkv_bias"],
        output_bias=like["output_bias"],
        qk_norm=like["qk_norm"],
        post_norms=like["norms"] != "before",
        activation=_ACTIVATIONS[function],
        windows=_windows(hf),
        rope=lambda hf, size: _ropes(hf, size)[0],
    )
    ropes = _ropes(hf, decoder.head_dim)
    layers = tuple(
        replace(layer, rope=0 if layer.window is None else len(ropes) - 1) for layer in decoder.layers
    )
    return replace(decoder, pre_norms=like["norms"] != "after", layers=layers, ropes=ropes)


def _windows(hf: Hf) -> list[int | None] | None:
    """Returns the window of every layer: `layer_types` names the layers that have one, or all have one."""
    if hf.get("use_sliding_window") is False or hf.get("sliding_window") is None:
        return None
    return alternating_windows(hf, 1) if hf.get("layer_types") else sliding_windows(hf)


def _ropes(hf: Hf, size: int) -> tuple[Rope, ...]:
    """Returns the rotary embedding, or those of (layers that see all tokens, layers with a window)."""
    both = hf.get("rope_parameters") or {}
    kinds = [both[kind] for kind in ("full_attention", "sliding_attention") if both.get(kind)]
    return tuple(read_rope(hf, size, record=record) for record in kinds) or (read_rope(hf, size),)
