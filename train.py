"""The entry of slime launch scripts: `python3 train.py FLAGS` is `vime train FLAGS`."""

import sys

from vime.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
