"""Remedies for a prompt file in another format: another suffix, or a CSV with another separator."""

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
"""Maps a suffix to the call of pandas that reads such a file."""
_RENAMED = {".ndjson": ".jsonl", ".pq": ".parquet"}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_SEPARATORS = {";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}


def what_to_do(file: Path) -> str:
    """Returns the remedy for a file with a suffix that a run does not read."""
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
    """Raises ValueError for a CSV with one column whose fields have another separator than a comma. `starts` are the
    header and the first line."""
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
