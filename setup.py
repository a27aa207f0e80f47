"""The C code, built with the package: one library without Python headers, which kernels/native/c_library.py loads.

Everything else about the package is in pyproject.toml. This is not in its `ext-modules` table, which setuptools reads
from 74.1 on: the setuptools of a machine without a network may be older. And a table could not say what is missing.
"""

import importlib.util
import sysconfig
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command import editable_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

NAME = "freescale.kernels.native._native"
# No -march: hosts of a cluster may share an installation. Every product is rounded, as it is in NumPy.
FLAGS = ["-O3", "-std=gnu11", "-Wall", "-ffp-contract=off"]


# Python with a GIL has one name for libraries that any release of it loads; without one, each has its own.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")


def sources_digest() -> str:
    spec: Any = importlib.util.spec_from_file_location("c_library", "kernels/native/c_library.py")
    c_library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(c_library)
    return c_library.sources_digest(Path("kernels/native"))


# In the parent folder of a checkout named freescale, Python finds this folder, a namespace package, before an editable
# install. The finder of the install therefore comes first there; a real package on the path still precedes it.
editable_wheel._FINDER_TEMPLATE = getattr(editable_wheel, "_FINDER_TEMPLATE", "") + """

class _BeforeFolders:
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname == "freescale" and not getattr(PathFinder.find_spec(fullname), "has_location", False):
            return _EditableFinder.find_spec(fullname)


sys.meta_path.insert(0, _BeforeFolders)
"""


class BuildLibrary(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # times of files say nothing in a copy of a checkout

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
            define_macros=[("FS_SOURCES", f'"{sources_digest()}"')],
            extra_compile_args=FLAGS,
            py_limited_api=LIMITED,
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED else {},
)
