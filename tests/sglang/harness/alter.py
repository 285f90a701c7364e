# SPDX-License-Identifier: Apache-2.0
"""A connector of a release that does not exist yet: the module as it is, with one method of another signature."""
from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, Optional, Sequence

VERSION = "9.9.9"
CHANGE = """

def _altered(original):
    def method(*arguments, **named):
        return original(*arguments, **named)
    return method

{class_name}.{method} = _altered({class_name}.{method})
"""


class Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, change: str) -> None:
        super().__init__(name, path)
        self.change = change

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path) + self.change.encode(), self.path)


class Finder:
    def __init__(self, module: str, change: str) -> None:
        self.module, self.change = module, change

    def find_spec(self, name: str, path: Optional[Sequence[str]], target: Any = None) -> Any:
        stock = importlib.machinery.PathFinder.find_spec(name, path) if name == self.module else None
        if stock is None or stock.origin is None:
            return None
        return importlib.util.spec_from_file_location(name, stock.origin, loader=Loader(name, stock.origin, self.change))


def alter(module: str, class_name: str, method: str) -> None:
    """To be called before the module is imported: the method does what it did, and takes any arguments."""
    import sglang
    sglang.__version__ = VERSION
    sys.meta_path.insert(0, Finder(module, CHANGE.format(class_name=class_name, method=method)))  # type: ignore[arg-type]
