"""What to do about a file of prompts in another format: another suffix, or a CSV with another separator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_PANDAS = {
    ".tsv": 'read_csv({file!r}, sep="\\t")',
    ".tab": 'read_csv({file!r}, sep="\\t")',
    ".xlsx": "read_excel({file!r})",
    ".xls": "read_excel({file!r})",
    ".pkl": "read_pickle({file!r})",
    ".feather": "read_feather({file!r})",
}
"""The suffix -> what reads such a file with pandas."""
_RENAMED = {".ndjson": ".jsonl", ".pq": ".parquet"}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_SEPARATORS = {";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}


def what_to_do(file: Path) -> str:
    """The remedy for a file whose suffix is none of those that a run reads."""
    if reads := _PANDAS.get(file.suffix):
        call = reads.format(file=str(file))
        csv = str(file.with_suffix(".csv"))
        return f"write it as CSV with commas: pandas.{call}.to_csv({csv!r}, index=False)"
    if suffix := _RENAMED.get(file.suffix):
        return f"rename it to {file.with_suffix(suffix).name}"
    if file.suffix in _PACKED:
        return "unpack it"
    return "convert or rename it"


def require_commas(file: Path, starts: Sequence[tuple[int, Sequence[str]]]) -> None:
    """ValueError for a CSV that has one column, because its lines are separated by something else than a comma.
    `starts`: the header and the first line."""
    (_, header), *rest = starts or [(0, ())]
    for sign, name in _SEPARATORS.items():
        times = header[0].count(sign) if len(header) == 1 else 0
        if times and all(",".join(fields).count(sign) == times for _, fields in rest):
            file_now, csv = str(file), str(file.with_name(f"{file.stem}-commas.csv"))
            raise ValueError(
                f"{file}:1: fields of a CSV must be separated by commas, got one column {header[0]!r:.80}, which has "
                f"{name} in it; write the file with commas: pandas.read_csv({file_now!r}, sep={sign!r})"
                f".to_csv({csv!r}, index=False)"
            )
