# SPDX-License-Identifier: Apache-2.0
"""Stand-in for SGLang's compiled kernels: every name exists, and only a call fails.

SGLang imports kernels by name at module level but has a torch path for what runs on a CPU, so nothing here is called.
"""
from __future__ import annotations

from typing import Any, Callable


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build")

    absent.__name__ = name
    return absent
