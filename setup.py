"""The C code, built with the package: one library without Python headers, which kernels/native/c_library.py loads.

Everything else about the package is in pyproject.toml. This is not in its `ext-modules` table, which setuptools reads
from 74.1 on: the setuptools of a machine without a network may be older. And a table could not say what is missing.
"""

from glob import glob
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

NAME = "freescale.kernels.native._native"
# No -march: hosts of a cluster may share an installation. Every product is rounded, as it is in NumPy.
FLAGS = ["-O3", "-std=gnu11", "-Wall", "-ffp-contract=off"]


class BuildLibrary(build_ext):
    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, LinkError) as error:
            raise CompileError(
                "freescale is not installed, because its C code cannot be built. Install a C compiler (gcc or clang; "
                f"Inductor and Triton need one too), then try again. ({error})"
            ) from None


setup(
    ext_modules=[
        Extension(
            NAME,
            sorted(glob("kernels/native/*.c")),
            depends=sorted(glob("kernels/native/*.h")),
            extra_compile_args=FLAGS,
            py_limited_api=True,  # any Python loads it
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
