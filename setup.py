"""Build entry for pip. The metadata is in pyproject.toml; this file records the commit in what is built."""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


def record_commit(root):
    """Write ROOT/vime/COMMIT, which `vime --version` reads; without a history, as in a source archive, do nothing."""
    if Path(".git").exists():
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True)
        Path(root, "vime", "COMMIT").write_bytes(done.stdout)


class Build(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            record_commit(self.build_lib)


class Archive(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        record_commit(base_dir)


setup(cmdclass={"build_py": Build, "sdist": Archive})
