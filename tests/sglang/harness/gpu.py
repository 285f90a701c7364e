# SPDX-License-Identifier: Apache-2.0
"""Pools in "GPU memory": of the tests' double of the CUDA driver, which the CPU may read and write here."""
from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Optional

import numpy as np
import numpy.typing as npt

from .processes import ROOT

GRANULARITY = 2 << 20
PARTS = 2   # physical allocations of mapped memory
PINNED, DEVICE, READWRITE = 1, 1, 3
HANDLES = {"vmm": 1, "fabric": 8}   # of mapped memory: what its owner allows it to be exported as
VARIABLE = "KVS_TEST_GPU"

_driver: Optional[ctypes.CDLL] = None


def double() -> Optional[Path]:
    """The library, if the build folder of the tests has it."""
    path = ROOT / "build-test" / "tests" / "doubles" / "libcuda.so.1"
    return path if path.exists() else None


def environment(kind: str) -> dict[str, str]:
    """For a rank whose pools are to be in memory of this kind: legacy, vmm, fabric or pool."""
    return {VARIABLE: f"{kind}:{double()}", "KVS_DOUBLE_CUDA_HOST_ACCESS": "1"}


def _check(result: int, call: str) -> None:
    if result != 0:
        raise RuntimeError(f"{call}: {result}")


def _start(path: str) -> ctypes.CDLL:
    global _driver
    if _driver is None:
        _driver = ctypes.CDLL(path)
        context = ctypes.c_void_p()
        _check(_driver.cuInit(0), "cuInit")
        _check(_driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
        _check(_driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return _driver


def _mapped(driver: ctypes.CDLL, size: int, handles: int) -> int:
    part = -(-size // (PARTS * GRANULARITY)) * GRANULARITY
    address, handle = ctypes.c_uint64(), ctypes.c_uint64()
    prop = struct.pack("IIIiQ8s", PINNED, handles, DEVICE, 0, 0, b"")
    access = struct.pack("IiI", DEVICE, 0, READWRITE)
    whole = ctypes.c_size_t(part * PARTS)
    _check(driver.cuMemAddressReserve(ctypes.byref(address), whole, ctypes.c_size_t(0), ctypes.c_uint64(0),
                                      ctypes.c_uint64(0)), "cuMemAddressReserve")
    for number in range(PARTS):
        _check(driver.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(part), prop, ctypes.c_uint64(0)), "cuMemCreate")
        _check(driver.cuMemMap(ctypes.c_uint64(address.value + number * part), ctypes.c_size_t(part), ctypes.c_size_t(0),
                               handle, ctypes.c_uint64(0)), "cuMemMap")
        _check(driver.cuMemRelease(handle), "cuMemRelease")
    _check(driver.cuMemSetAccess(address, whole, access, ctypes.c_size_t(1)), "cuMemSetAccess")
    return address.value


def allocate(size: int) -> Optional[npt.NDArray[np.uint8]]:
    """Bytes of a GPU if this rank is to have some, else None."""
    kind, _, path = os.environ.get(VARIABLE, "").partition(":")
    if not kind:
        return None
    driver = _start(path)
    address = ctypes.c_uint64()
    if kind in HANDLES:
        address.value = _mapped(driver, size, HANDLES[kind])
    elif kind == "pool":
        _check(driver.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(size), None), "cuMemAllocAsync")
    else:
        _check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), "cuMemAlloc")
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address.value))
