"""Builds the native extension. Everything else about the package is in pyproject.toml.

SSDTUNE_NATIVE=0 leaves the extension out: slower, but it needs no compiler.
"""

import os
from pathlib import Path

from setuptools import Extension, setup


def paths(pattern: str) -> list[str]:
    root = Path(__file__).parent
    return sorted(str(path.relative_to(root)) for path in root.glob(pattern))


def native_extension() -> Extension:
    import pybind11

    return Extension(
        "ssdtune._native",
        sources=[*paths("native/src/*.cpp"), "native/bindings/module.cpp"],
        depends=paths("native/include/ssdtune/*.h"),
        include_dirs=["native/include", pybind11.get_include()],
        language="c++",
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            "-pthread",
            "-Wall",
            "-Wextra",
            # Same bits on every machine: no fused multiply-add, no shortcuts. The other two change no result.
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
        ],
        extra_link_args=["-pthread"],
    )


setup(ext_modules=[] if os.environ.get("SSDTUNE_NATIVE") == "0" else [native_extension()])
