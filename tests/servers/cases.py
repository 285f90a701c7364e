# SPDX-License-Identifier: Apache-2.0
"""The server pairs that are tried, and what must come of each."""
from __future__ import annotations

from dataclasses import dataclass

LENGTHS = (5, 40, 130, 300, 1000)      # the window of the models is 64 tokens
NEW_TOKENS = 16

# How a pair ends. The tokens are compared with a single server's.
EQUAL = "equal tokens"
DIFFERENT = "different tokens"
REFUSED = "refused"
FAILED = "transfer threads dead"


@dataclass(frozen=True)
class Case:
    name: str
    release: str
    architecture: str
    prefill_tp: int
    decode_tp: int
    stock: str                  # how it ends without the library
    expect: str = EQUAL         # and with it
    kv_heads: int = 0           # 0: the architecture's default
    prefill_pp: int = 1
    page_size: int = 1
    chunk: int = 0              # tokens per prefill chunk, 0: the default, longer than every prompt
    fixups: str = ""            # optional fix-ups, on both sides
    replicated: bool = False    # heads are replicated as on a GPU


CASES = (
    Case("2to1", "0.5.21", "gptoss", 2, 1, stock=REFUSED),
    Case("1to2-pages-chunks", "0.5.21", "gptoss", 1, 2, stock=REFUSED, page_size=16, chunk=256),
    Case("4to1-replicated", "0.5.21", "gptoss", 4, 1, stock=REFUSED, kv_heads=2, fixups="replicated_heads",
         replicated=True),
    # Two stages of two ranks each: sliding-window and full layers by turns on both.
    Case("2to1-pipeline2", "0.5.21", "gptoss", 2, 1, stock=REFUSED, prefill_pp=2),
    Case("2to1-dropped", "0.5.21", "gptoss", 2, 1, stock=DIFFERENT, expect=DIFFERENT, fixups="drop_state"),
    Case("2to1-0.5.18", "0.5.18", "gptoss", 2, 1, stock=REFUSED),
    Case("1to2-0.5.23", "0.5.23", "gptoss", 1, 2, stock=EQUAL),
    Case("mimo-2to1", "0.5.23", "mimo", 2, 1, stock=DIFFERENT),
    # Two heads in the full-attention layers, four in the others: only the former are replicated.
    Case("mimo-4to1", "0.5.23", "mimo", 4, 1, stock=FAILED, fixups="replicated_heads", replicated=True),
)
