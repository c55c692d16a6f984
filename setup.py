"""The native kernel library: C++ with a C interface, each file of an instruction path with that path's flags.

Everything else is in pyproject.toml.  Where it can't be built (no compiler, another processor, another system) the
package is installed without it and computes with torch alone.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

FOLDER = Path("batchgen_beam/kernels/native")
COMMON = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma",
          "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC 12 sees these in its own intrinsics
PATHS = {"path_avx2.cpp": ["-mavx2", "-mfma"], "path_avx512.cpp": AVX512,
         "path_avx512_bf16.cpp": [*AVX512, "-mavx512bf16"], "path_amx_bf16.cpp": AVX512}
"""No flag here names the machine that builds: the library asks at run time what it may use."""


class BuildNative(build_ext):
    """Compiles file by file, and lets the package be installed without the library."""

    def build_extension(self, ext: Extension) -> None:
        """Objects with their own flags, then the library."""
        try:
            objects = [built for source in ext.sources for built in self.compiler.compile(
                [source], output_dir=self.build_temp, depends=ext.depends,
                extra_postargs=[*COMMON, *PATHS.get(Path(source).name, [])])]
            self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread"],
                                             target_lang="c++")
        except (BaseError, CCompilerError, OSError) as error:
            sys.stderr.write(f"batchgen-beam: native kernels not built ({error}); it will compute with torch alone, "
                             f"which is slower\n")


class PlatformWheel(bdist_wheel):
    """The library uses nothing of Python: one wheel for all versions."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3, this platform."""
        return "py3", "none", super().get_tag()[2]


def native() -> list[Extension]:
    """The library, where its instructions and its threads can exist."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return []
    return [Extension("batchgen_beam.kernels._native", sorted(map(str, FOLDER.glob("*.cpp"))),
                      depends=sorted(map(str, FOLDER.glob("*.h"))), language="c++", py_limited_api=True, optional=True)]


setup(ext_modules=native(), cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel})
