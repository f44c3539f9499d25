"""Build entry for pip. The metadata is in pyproject.toml; this file adds the commit and the error messages."""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command import build_py, sdist


def record_commit(root):  # which `vime --version` prints; a source archive has no history
    if Path(".git").exists():
        Path(root, "vime", "COMMIT").write_bytes(subprocess.check_output(["git", "rev-parse", "HEAD"]))


class Build(build_py.build_py):
    def build_package_data(self):  # an editable install does not call this
        super().build_package_data()
        record_commit(self.build_lib)
        subprocess.check_call([sys.executable, "vime/explain/sources.py", self.build_lib])


class Archive(sdist.sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        record_commit(base_dir)


setup(cmdclass={"build_py": Build, "sdist": Archive})
