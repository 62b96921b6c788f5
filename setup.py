"""Compiles the operators when the package is installed; everything else is in pyproject.toml.

    pip install --no-build-isolation -e .

Without `--no-build-isolation` pip builds in an environment that has no torch, and the operators are
left for `cldetr build`. A compiler that fails does not stop the installation: the package works
without the operators, only slower.
"""

import importlib.util
import logging
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "projects" / "CLDETR"))
logger = logging.getLogger("cldetr")
HAS_TORCH = importlib.util.find_spec("torch") is not None


class BuildWithOperators(build_py):
    """Compiles before the files of the package are collected: the libraries are among them."""

    def run(self) -> None:
        """Builds, then collects."""
        compile_operators()
        super().run()


class DistributionWithOperators(Distribution):
    """A wheel with compiled libraries is for one platform."""

    def has_ext_modules(self) -> bool:
        """Says whether the name of the wheel must tell the platform."""
        return HAS_TORCH


def compile_operators() -> None:
    """Builds what is missing or out of date; says what to do where that fails."""
    if not HAS_TORCH:
        logger.warning("torch is not visible to this build; run `cldetr build` when it is done")
        return
    from cldetr.errors import InputError
    from cldetr.layers.build import build_libraries

    try:
        for line in build_libraries():
            logger.warning("%s", line)
    except InputError as error:
        logger.warning("%s\nrun `cldetr build` when this is mended", error)


setup(cmdclass={"build_py": BuildWithOperators}, distclass=DistributionWithOperators)
