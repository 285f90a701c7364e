# SPDX-License-Identifier: Apache-2.0
"""Page indices stay where they are.

From 0.5.23 on the prefill copies page indices to pinned memory and records a CUDA event whenever its sender says that it
takes tensors of the host. There is neither here, so the senders say no and get the arrays that they got before.
"""
from __future__ import annotations

from types import ModuleType

_SENDERS = ("MooncakeKVSender", "NixlKVSender")


def _no_host_tensors(module: ModuleType) -> None:
    for name in _SENDERS:
        sender = getattr(module, name, None)
        if getattr(sender, "supports_host_tensor_indices", False):
            setattr(sender, "supports_host_tensor_indices", False)


AFTER = {
    "sglang.srt.disaggregation.mooncake.conn": _no_host_tensors,
    "sglang.srt.disaggregation.nixl.conn": _no_host_tensors,
}
