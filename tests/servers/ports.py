# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports below the range that the kernel hands out by itself, so that nobody else takes them in between."""
from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20000, 30000
_given: set[int] = set()


def free_port() -> int:
    for _ in range(1000):
        port = random.randint(_FIRST, _LAST)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError(f"no free TCP port found between {_FIRST} and {_LAST} in 1000 tries")
