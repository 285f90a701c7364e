# SPDX-License-Identifier: Apache-2.0
"""The right tokens: those of one plain server that holds the whole model, kept in the cache."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Callable, Sequence

from .environment import CACHE
from .launch import Spec, running
from .models import Model
from .request import generate, prompt

SECONDS = 60.0


def expected(model: Model, release: str, lengths: Sequence[int], new_tokens: int, logs: Path,
             progress: Callable[[str], None]) -> dict[int, list[int]]:
    """Tokens by prompt length."""
    key = hashlib.sha256(json.dumps([list(lengths), new_tokens]).encode()).hexdigest()[:8]
    path = CACHE / "expected" / f"{model.name}-{release}-{key}.json"
    if path.exists():
        return {int(length): tokens for length, tokens in json.loads(path.read_text()).items()}
    progress(f"a single server of SGLang {release} makes the expected tokens of {model.name}, once")
    with running([Spec("single", release, model)], logs, progress=progress) as (server,):
        tokens = {length: generate(server.port, prompt(length), new_tokens, SECONDS) for length in lengths}
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = path.with_suffix(".part")
    parts.write_text(json.dumps(tokens))
    parts.rename(path)
    return tokens
