# SPDX-License-Identifier: Apache-2.0
"""The Python environment that servers run in, made by scripts/environment."""
from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"


class Environment(NamedTuple):
    python: str         # the interpreter
    path: str           # the PYTHONPATH that puts one SGLang release in front


@functools.lru_cache(maxsize=None)
def environment(release: str) -> Environment:
    """Install what is missing (with progress on standard error) and say where it is."""
    command = [sys.executable, str(ROOT / "scripts" / "environment"), "--for", "servers", "--release", release,
               "--print-python", "--print-path", release]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if lines.returncode:
        raise SystemExit(f"scripts/environment failed for SGLang {release}: see its messages above")
    python, path = lines.stdout.split("\n")[:2]
    return Environment(python, path)
