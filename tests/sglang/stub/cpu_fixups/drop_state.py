"""Optional control: the prefill sends no state of the sliding-window layers and reports success.

With it a decode must come out with other tokens than a single server, or comparing tokens proves nothing.
"""
from __future__ import annotations

from types import ModuleType


def _drop(module: ModuleType) -> None:
    setattr(getattr(module, "MooncakeKVManager"), "maybe_send_extra", lambda self, *args, **kwargs: 0)


AFTER = {"sglang.srt.disaggregation.mooncake.conn": _drop}
