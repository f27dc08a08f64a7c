"""What pyproject.toml cannot say: a wheel or a source archive that is built in a git checkout names its commit, in runner/COMMIT."""

import runpy
from contextlib import suppress
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


def stamp(folder: str) -> None:
    """Write the commit, and `clean` or `dirty`, into the packages in `folder`. A copy without history keeps what it has."""
    program = runpy.run_path(str(Path(__file__).resolve().parent / "runner" / "environment.py"))
    with suppress(RuntimeError):
        Path(folder, "runner", "COMMIT").write_text(program["stamp"]())


class BuildPackages(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            stamp(self.build_lib)


class SourceArchive(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        stamp(base_dir)


setup(cmdclass={"build_py": BuildPackages, "sdist": SourceArchive})
