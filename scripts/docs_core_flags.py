"""Writes Megatron's flags of the installed megatron-core to slime/config/core_flags.json.

    python scripts/docs_core_flags.py          for the megatron-core that Python imports
    python scripts/docs_core_flags.py --check  exit status 1 if the table differs

The rows of other versions stay. tests/slime/config/test_config_megatron.py and test_megatron_versions.py compare them.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys

from slime.config.core_table import TABLE, FlagRow, make_row
from slime.config.megatron_flags import imported_core_flags


def text(table: dict[str, dict[str, FlagRow]]) -> str:
    """Returns the table as JSON with one line per flag."""
    versions = []
    for version in sorted(table):
        rows = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table[version].items())
        )
        versions.append(f" {json.dumps(version)}: {{\n{rows}\n }}")
    return "{\n" + ",\n".join(versions) + "\n}\n"


def main(argv: list[str]) -> int:
    before = TABLE.read_text(encoding="utf-8") if TABLE.is_file() else "{}"
    rows = {name: make_row(flag) for name, flag in imported_core_flags().items()}
    after = text(json.loads(before) | {importlib.metadata.version("megatron-core"): rows})
    if argv == ["--check"]:
        return int(after != before)
    TABLE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
