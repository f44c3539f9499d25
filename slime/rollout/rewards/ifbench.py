"""The `ifbench` reward: 1 if a response follows all instructions of its prompt by the checks of IFBench, otherwise 0.

The package if-verifiable has the checks of IFBench (https://arxiv.org/abs/2507.02833). The metadata of a prompt have
`instruction_id_list` and `kwargs`, as in the benchmark's files and in slime's.
"""

from __future__ import annotations

from collections.abc import Container

from slime.types import Metadata

_DATA = "punkt punkt_tab averaged_perceptron_tagger_eng stopwords"
"""NLTK's data that some checks read."""


def ifbench_reward(response: str, label: object, metadata: Metadata | None = None) -> float:
    """Returns 1.0 if the response, without its thinking, follows all instructions (strict), otherwise 0.0.

    Raises ValueError for metadata without instructions, and for an instruction that IFBench does not have. Raises
    RuntimeError if a check needs data of NLTK that is not installed.
    """
    try:
        from if_verifiable.common import evaluate_instructions
        from if_verifiable.ifbench import INSTRUCTION_DICT
    except ImportError as error:
        raise ValueError(
            f"--rm-type ifbench must have the package if-verifiable, got {error}; pip install if-verifiable"
        ) from error
    ids, arguments = _instructions(metadata or {}, INSTRUCTION_DICT)
    prompt = str((metadata or {}).get("prompt_text") or "")
    try:
        _, scores = evaluate_instructions(response, ids, arguments, prompt, INSTRUCTION_DICT)
    except LookupError as error:
        if (
            type(error) is not LookupError
        ):  # NLTK's own, while a check's KeyError or IndexError is a wrong answer
            raise
        raise RuntimeError(
            f"--rm-type ifbench must have NLTK's data, got none for one of {', '.join(ids)}; "
            f"python -m nltk.downloader {_DATA}"
        ) from error
    return float(scores.binary_strict)


def check_metadata(label: object, metadata: Metadata) -> None:
    """Raises ValueError for metadata that no response can match, see `ifbench_reward`."""
    ifbench_reward("", label, metadata)


def _instructions(metadata: Metadata, known: Container[str]) -> tuple[list[str], list[dict[str, object]]]:
    """Returns the ids of a prompt's instructions, and the arguments of each."""
    ids, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs") or []
    ids = [ids] if isinstance(ids, str) else ids
    if not isinstance(ids, list | tuple) or not ids:
        raise ValueError(
            f"metadata of --rm-type ifbench must have a list of ids in instruction_id_list, got {ids!r:.80}; add it"
        )
    if unknown := [name for name in ids if name not in known]:
        raise ValueError(
            f"instruction_id_list must name instructions of IFBench, got {unknown[0]!r:.80}; correct the prompt file"
        )
    arguments = [arguments] if isinstance(arguments, dict) else arguments
    if not isinstance(arguments, list | tuple) or len(arguments) not in (0, len(ids)):
        raise ValueError(
            f"kwargs of --rm-type ifbench must have an object per instruction, got {arguments!r:.80} for {len(ids)}; "
            "correct the prompt file"
        )
    stated = [dict(entry or {}) for entry in arguments] or [{} for _ in ids]
    return list(ids), stated
