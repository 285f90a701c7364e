# SPDX-License-Identifier: Apache-2.0
"""Optional control: the prefill hands its connector no state of the sliding-window layers, and all else as usual.

With it a decode must come out with other tokens than a single server, or comparing tokens proves nothing.
"""
from __future__ import annotations

import functools
from types import ModuleType
from typing import Any


def _drop(module: ModuleType) -> None:
    sender = getattr(module, "MooncakeKVSender")
    original = sender.send

    @functools.wraps(original)
    def send(self: Any, kv_indices: Any, state_indices: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, kv_indices, None, *args, **kwargs)

    sender.send = send


AFTER = {"sglang.srt.disaggregation.mooncake.conn": _drop}
