# SPDX-License-Identifier: Apache-2.0
"""The CUDA test program and the double of the driver, built with a C compiler alone."""
from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parents[2]


def has_driver() -> bool:
    """Is there a driver on this machine, with a GPU?"""
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == 0)
    except OSError:
        return False


def sources(*folders: str) -> List[str]:
    return [str(path) for folder in folders for path in sorted((ROOT / folder).glob("*.c"))
            if not path.name.startswith("check_")]


def compile_c(compiler: str, output: Path, *arguments: str) -> None:
    subprocess.run([compiler, "-std=gnu11", "-O2", "-fno-strict-aliasing", "-o", str(output), *arguments], cwd=ROOT,
                   check=True)


def build(folder: Path, compiler: str) -> Path:
    """The test program, from the sources of two rooms and of the tests."""
    program = folder / "cuda_tests"
    ptx = ROOT / "transport" / "kernels" / "copy.ptx"
    compile_c(compiler, program, '-DKVS_VERSION="check"', f'-DKVS_COPY_PTX="{ptx}"',
              *sources("policy", "transport", "tests/cuda"), "-lpthread", "-ldl")
    return program


def build_double(folder: Path, compiler: str) -> Path:
    """A folder with the double as libcuda.so.1."""
    compile_c(compiler, folder / "libcuda.so.1", "-shared", "-fPIC", "-fvisibility=hidden",
              *sources("tests/doubles/cuda"), "-lpthread", "-ldl")
    return folder
