# SPDX-License-Identifier: Apache-2.0
"""Tiny models, made once and kept in the cache."""
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .environment import CACHE, environment

MAKER = Path(__file__).with_name("make_model.py")


@dataclass(frozen=True)
class Architecture:
    kv_heads: int               # by default
    maker_release: str          # its transformers knows the architecture, and writes what older releases can read
    modules: tuple[str, ...]    # of SGLang, that hold the model
    arguments: tuple[str, ...]  # of the server


ARCHITECTURES = {
    # gpt-oss refuses torch_native by name, see the attention fix-up.
    "gptoss": Architecture(4, "0.5.21", ("gpt_oss",), ("--attention-backend", "intel_amx", "--moe-runner-backend", "triton")),
    "mellum": Architecture(4, "0.5.21", ("mellum",), ("--attention-backend", "torch_native")),
    "mimo": Architecture(2, "0.5.23", ("mimo_v2",), ("--attention-backend", "torch_native")),
}


@dataclass(frozen=True)
class Model:
    name: str
    folder: Path
    modules: tuple[str, ...]
    arguments: tuple[str, ...]


def model(architecture: str, kv_heads: int = 0) -> Model:
    """The model's folder; made when it is not there or its recipe changed."""
    kind = ARCHITECTURES[architecture]
    heads = kv_heads or kind.kv_heads
    recipe = hashlib.sha256(MAKER.read_bytes()).hexdigest()[:8]
    name = f"{architecture}-{heads}kv-{recipe}"
    folder = CACHE / "models" / name
    if not folder.exists():
        tools = environment(kind.maker_release)
        parts = folder.with_name(f"{name}.part")
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        made = subprocess.run([tools.python, str(MAKER), architecture, str(heads), str(parts)], text=True,
                              env={**os.environ, "PYTHONPATH": tools.path, "HF_HUB_OFFLINE": "1"},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if made.returncode:
            raise RuntimeError(f"making the model {name} failed:\n{made.stdout[-3000:]}")
        parts.rename(folder)
    return Model(name, folder, kind.modules, kind.arguments)
