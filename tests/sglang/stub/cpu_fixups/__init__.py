# SPDX-License-Identifier: Apache-2.0
"""What SGLang needs changed to run on a CPU, applied to a module when it is imported.

A fix-up is a module of this package with a table AFTER (or BEFORE) from the name of a module to a function that is
called with that module once its code ran (or with nothing just before).
"""
from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any, Callable, Optional

ALWAYS = ("attention", "connectors", "nixl_memory", "paged_allocation", "torchvision_operators")
OPTIONAL = ("drop_state", "replicated_heads")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, before: dict[str, list[Callable[[], None]]],
                 after: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._before, self._after = before, after

    def find_spec(self, fullname: str, path: Any,
                  target: Optional[ModuleType] = None) -> Optional[importlib.machinery.ModuleSpec]:
        before, after = self._before.get(fullname, []), self._after.get(fullname, [])
        if not before and not after:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            for function in before:
                function()
            execute(module)
            for change in after:
                change(module)

        setattr(spec.loader, "exec_module", exec_module)
        return spec


def install() -> None:
    wanted = [name for name in os.environ.get("CPU_FIXUPS", "").split(",") if name]
    unknown = [name for name in wanted if name not in OPTIONAL]
    if unknown:
        sys.exit(f"CPU_FIXUPS: no fix-up named {', '.join(unknown)}; there are {', '.join(OPTIONAL)}")
    before: dict[str, list[Callable[[], None]]] = {}
    after: dict[str, list[Callable[[ModuleType], None]]] = {}
    for name in (*ALWAYS, *wanted):
        fixup = importlib.import_module(f"{__name__}.{name}")
        for table, own in ((before, getattr(fixup, "BEFORE", {})), (after, getattr(fixup, "AFTER", {}))):
            for module, function in own.items():
                table.setdefault(module, []).append(function)
    sys.meta_path.insert(0, _Finder(before, after))
