"""The asynchronous entry of slime launch scripts: `vime train`, generating one update ahead of training."""

import sys

from vime.cli import main


def async_argv(argv: list[str]) -> list[str]:
    """`argv` with --max-staleness 1 unless given. ValueError for --colocate, where nothing can run ahead."""
    names = [token.partition("=")[0] for token in argv]
    if "--colocate" in names:
        raise ValueError("--colocate must be left out of train_async.py, got --colocate; use train.py")
    return argv if "--max-staleness" in names else [*argv, "--max-staleness", "1"]


if __name__ == "__main__":
    try:
        arguments = async_argv(sys.argv[1:])
    except ValueError as error:
        print(f"train_async.py: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(["train", *arguments]))
