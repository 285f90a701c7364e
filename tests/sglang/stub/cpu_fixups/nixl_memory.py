# SPDX-License-Identifier: Apache-2.0
"""SGLang registers its pools with NIXL as GPU memory, which UCX refuses for memory of the host: call that DRAM too."""
from __future__ import annotations

from types import ModuleType
from typing import Any


def _host_memory(module: ModuleType) -> None:
    agent = getattr(module, "nixl_agent")
    original = agent.__init__

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    agent.__init__ = initialise


AFTER = {"nixl_cu12._api": _host_memory, "nixl_cu13._api": _host_memory}
