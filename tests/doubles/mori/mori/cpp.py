# SPDX-License-Identifier: Apache-2.0
"""The part of mori.cpp that SGLang uses: the status of one batch of writes."""
from __future__ import annotations

import threading


class TransferStatus:
    """Under way until the engine's thread concludes it, once."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error = ""

    def _conclude(self, error: str = "") -> None:
        self._error = error
        self._done.set()

    def InProgress(self) -> bool:
        return not self._done.is_set()

    def Succeeded(self) -> bool:
        return self._done.is_set() and not self._error

    def Failed(self) -> bool:
        return self._done.is_set() and bool(self._error)

    def Message(self) -> str:
        return self._error

    def Wait(self) -> None:
        self._done.wait()
