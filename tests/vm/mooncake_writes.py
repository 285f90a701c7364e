#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Inside the machine: one request as Mooncake's RDMA transport carries it without kvsplice, a write for every token.

Two processes, the memory of both registered once. Prints 'bench: mooncake seconds=... writes=... bytes=...', the time
of all writes; the first batch, in which connections are made, is not counted. Every byte of the target is checked.
"""
from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Tuple

ADDRESS = "10.77.0.1"


def memory(size: int) -> Tuple[mmap.mmap, int]:
    area = mmap.mmap(-1, size)
    return area, ctypes.addressof(ctypes.c_char.from_buffer(area))


def make_engine(device: str):     # type: ignore[no-untyped-def]
    from mooncake.engine import TransferEngine
    engine = TransferEngine()
    if engine.initialize(ADDRESS, "P2PHANDSHAKE", "rdma", device) != 0:
        raise SystemExit("Mooncake's engine could not be initialized")
    return engine


def pattern(size: int) -> bytes:
    """Different in every 8 bytes of a megabyte."""
    block = b"".join((number * 0x9E3779B97F4A7C15 % 2 ** 64).to_bytes(8, "little") for number in range(1 << 17))
    return (block * (size // len(block) + 1))[:size]


def target(pipe: Connection, device: str, size: int, row: int, length: int) -> None:
    engine = make_engine(device)
    area, address = memory(size * row // length)
    if engine.register_memory(address, len(area)) != 0:
        raise SystemExit("the target's memory could not be registered")
    pipe.send((f"{ADDRESS}:{engine.get_rpc_port()}", address))
    pipe.recv()
    wanted = pattern(size)
    wrong = sum(area[at // length * row:at // length * row + length] != wanted[at:at + length]
                for at in range(0, size, length))
    pipe.send(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="rxe0")
    parser.add_argument("--bytes", type=int, required=True, help="of the request")
    parser.add_argument("--length", type=int, default=512, help="bytes of a write (default 512)")
    parser.add_argument("--batch", type=int, default=1024, help="writes handed over at once (default 1024)")
    options = parser.parse_args()
    os.environ.setdefault("MC_GID_INDEX", "1")
    length, row = options.length, 2 * options.length     # at the target another rank's slice lies between
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=target, args=(there, options.device, options.bytes, row,
                                                                             length))
    child.start()
    engine = make_engine(options.device)
    area, address = memory(options.bytes)
    area[:] = pattern(options.bytes)
    if engine.register_memory(address, len(area)) != 0:
        raise SystemExit("the source's memory could not be registered")
    session, remote = here.recv()

    def write(first: int, count: int) -> None:
        sources = [address + number * length for number in range(first, first + count)]
        targets = [remote + number * row for number in range(first, first + count)]
        status = engine.batch_transfer_sync_write(session, sources, targets, [length] * count)
        if status != 0:
            raise SystemExit(f"Mooncake: a batch of {count} writes ended with {status}")

    total = options.bytes // length
    write(0, 1)
    begin = time.monotonic()
    for first in range(0, total, options.batch):
        write(first, min(options.batch, total - first))
    seconds = time.monotonic() - begin
    here.send("check")
    wrong = here.recv()
    child.join()
    if wrong:
        raise SystemExit(f"{wrong} of {total} writes did not arrive")
    print(f"bench: mooncake seconds={seconds:.6f} writes={total} bytes={options.bytes}", flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)     # the engine's own threads do not end by themselves
