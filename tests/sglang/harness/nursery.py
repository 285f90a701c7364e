# SPDX-License-Identifier: Apache-2.0
"""A process that imports one SGLang release once and forks a process for each rank that is asked for.

Run as `python -m harness.nursery SOCKET`; it reads one line per rank (`NAME LOG`) from standard input and ends with it.
The connector's own module is imported in the rank, so that options in a rank's environment are seen and nothing of a
transfer engine, whose threads no fork would copy, exists before.
"""
from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Client, Connection

from .rank import Rank, die_with_parent

IMPORTS = (
    "numpy", "torch", "zmq", "requests", "aiohttp.web", "prometheus_client",
    "sglang.srt.runtime_context", "sglang.srt.disaggregation.base.conn", "sglang.srt.disaggregation.utils",
    "sglang.srt.disaggregation.common.conn", "sglang.srt.disaggregation.common.staging_handler",
    "sglang.srt.disaggregation.common.utils",
    "sglang.srt.observability.mooncake_trace", "sglang.srt.observability.trace",
    "sglang.srt.distributed.device_communicators.mooncake_transfer_engine",
    "harness.oracle", "harness.context",
)


def serve(connection: Connection) -> None:
    """Run a rank's methods as they are asked for, until the driver goes away."""
    rank = Rank()
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = (True, getattr(rank, method)(**arguments))
        except BaseException:   # a rank must answer whatever happens in it
            answer = (False, traceback.format_exc())
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionError):
            return


def become_rank(address: str, name: str, log: str) -> None:
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    with Client(address, family="AF_UNIX") as connection:
        connection.send((name, os.getpid()))
        serve(connection)


def main() -> None:
    die_with_parent()
    import importlib
    for module in IMPORTS:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:    # of a release that has no such module yet
            if error.name != module:
                raise
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        name, log = line.split()
        if os.fork() == 0:
            try:
                become_rank(sys.argv[1], name, log)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
