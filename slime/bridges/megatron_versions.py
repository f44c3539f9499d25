"""Bridges the differences between the versions of megatron-core that the trainer may run on. No other file of this
project asks for a version. The import is light: functions that need megatron-core import it.

0.16.1 is the newest version for Python 3.11. 0.19.2 needs Python 3.12. The trainer's tests run on both. A version
between them is treated as one of the two. A version below 0.16 is an error, and a version above 0.19 causes a note
(`check`).

what                                0.16.1                   0.19.2                       here
----------------------------------- ------------------------ ---------------------------- --------------------------
decoder layer of a layer of         transformer_layer        mtp_model_layer (since       `prediction_parts`,
multi-token prediction                                       0.17); checkpoints keep the  `stored_name`
                                                             older name
what such a layer makes of tokens   tokens, positions,       with a padding mask between  `prediction_inputs`
                                    embedding, state         them (since 0.18)
what such a layer returns           three values             four; the first is the same  the first is read
recomputation of such a layer       gets the function to run calls its own method         `PredictionLayer` calls
                                                                                          that method in both
records without tensors of a        common.pt                an object among the          `common_records`: we write
checkpoint                                                   tensors; common.pt is read,  common.pt with both, so
                                                             too                          checkpoints fit both
such records of Megatron's own      common.pt                the object                   both are read
checkpoints
modules of a layer are built by     build_module             a call with more arguments   ModuleSpec, or a class with
                                                                                          **unused, fit both
MLP in Megatron's layer spec        ModuleSpec               partial                      our own, or a ModuleSpec
norms of queries and keys in a      any                      only with qk_layernorm       `ProjectionNormedAttention`
spec                                                                                      has its own, in both
hook for the output                 none                     output_processor             `_postprocess`, in both
settings of Muon                    muon_use_nesterov        muon_nesterov, and the       `muon_settings`
                                                             coefficients
fields of the configs               with three that nothing  with 80 others               flags come from the
                                    reads                                                 installed one's fields
"""

from __future__ import annotations

import inspect
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

from slime.system import extras

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules
    from torch import Tensor

LEAST, LAST = (0, 16), (0, 19)
"""The supported range, as the first two numbers of the version."""
RUN = {"0.16.1": "on CPUs and GPUs", "0.19.2": "on CPUs and one GPU"}
"""The versions in requirements/cpu.txt and gpu.txt, and the devices on which the trainer has run with each version."""

COMMON = "common_state"
"""The key of the records without tensors in a checkpoint of 0.19."""


def installed() -> str | None:
    """Returns the installed version of megatron-core, or None without it. Does not import it."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def least() -> str:
    """Returns the oldest version that the trainer can run on."""
    return _text(LEAST)


def is_too_old(version: str) -> bool:
    return _numbers(version) < LEAST


def check(version: str) -> str | None:
    """Raises ValueError for a version that is too old. Returns a remark on a version that was never run, else None."""
    numbers = _numbers(version)
    if is_too_old(version):
        raise ValueError(
            f"megatron-core must be {least()} or newer, got {version}; install a tested one: {extras.install()}"
        )
    if version in RUN:
        return None
    relation = "newer than" if numbers > LAST else f"between {_text(LEAST)} and"
    run = " and ".join(f"{known} {where}" for known, where in RUN.items())
    return f"megatron-core {version} is {relation} {_text(LAST)} and was never run here; run were {run}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def muon_settings(core: OptimizerConfig) -> tuple[bool, str]:
    """Returns whether Muon uses Nesterov's momentum, and the name of its coefficients. `core` is an OptimizerConfig."""
    if hasattr(core, "muon_use_nesterov"):
        return core.muon_use_nesterov, "quintic"
    return core.muon_nesterov, core.muon_coefficient_type


def prediction_parts(layer: object, **parts: object) -> MultiTokenPredictionLayerSubmodules:
    """Returns the submodules of a layer of multi-token prediction. `layer` is the spec of the layer's decoder layer."""
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionLayerSubmodules as Submodules,
    )

    newer = hasattr(Submodules, "mtp_model_layer")
    return Submodules(**parts, **{"mtp_model_layer" if newer else "transformer_layer": layer})


def prediction_inputs(tokens: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the result of `MultiTokenPredictionLayer._get_embeddings`, without positions and padding mask."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    newer = "padding_mask" in inspect.signature(MultiTokenPredictionLayer._get_embeddings).parameters
    return (tokens, None, *((None,) if newer else ()), embedded, state)


def stored_name(name: str) -> str:
    """Returns the name that a parameter of the live model has in checkpoints and weight tables."""
    return name.replace(".mtp_model_layer.", ".transformer_layer.")


def common_records(state: dict[str, Any]) -> Any:
    """Takes the records without tensors out of the state that a save strategy gets, and returns them. Returns None if
    megatron-core has saved them itself."""
    item = state.pop(COMMON, None)
    return None if item is None else item.data
