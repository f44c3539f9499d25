"""Runs the `vime` command for `python -m vime`."""

import os
import sys

from slime.system.import_path import leave_current_folder

leave_current_folder(sys.path, os.environ)

from vime.cli import main  # noqa: E402  # not from the folder where the command is started

sys.exit(main())
