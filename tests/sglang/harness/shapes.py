# SPDX-License-Identifier: Apache-2.0
"""What real models register with a connector: pools of pages, in bytes."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

KV = "kv"
SWA = "swa"
CANARY = 0xC5       # decode memory that nothing was written to
UNUSED = 0x3A       # prefill pages that nobody asked for


@dataclass(frozen=True)
class Pool:
    """One component: layers of pages [token][head][head bytes], all keys before all values (0 bytes: no values)."""
    kind: str           # KV, or the value of an SGLang StateType
    layers: int
    heads: int          # of the whole model
    key_bytes: int      # per head and token
    value_bytes: int
    window: int = 0     # tokens that the layers attend to; 0: all
    replicated: bool = False    # every rank holds all heads

    def heads_of(self, tp_size: int, tp_rank: int) -> tuple[int, int]:
        """First head and number of heads that a rank holds; with more ranks than heads a head is on several."""
        if self.replicated:
            return 0, self.heads
        if tp_size <= self.heads:
            count = self.heads // tp_size
            return tp_rank * count, count
        return tp_rank // (tp_size // self.heads), 1

    @property
    def entries(self) -> int:
        """Registered buffers."""
        return self.layers * (2 if self.value_bytes else 1)

    def entry_bytes(self, entry: int) -> int:
        """Bytes per head and token of one registered buffer."""
        return self.key_bytes if entry < self.layers else self.value_bytes

    def first_page(self, tokens: int, page_size: int) -> int:
        start = max(0, tokens - self.window) if self.window else 0
        return start // page_size

    def page_count(self, tokens: int, page_size: int) -> int:
        return -(-tokens // page_size) - self.first_page(tokens, page_size)


@dataclass(frozen=True)
class Shape:
    name: str
    pools: tuple[Pool, ...]     # the KV pool, then the state components in order
    page_size: int = 64
    dtype: str = "bfloat16"
    draft: Optional[Pool] = None    # a draft model's: its buffers follow those of the KV pool, under the same pages

    def with_layers(self, *layers: int) -> Shape:
        pools = tuple(replace(pool, layers=count) for pool, count in zip(self.pools, layers))
        return replace(self, pools=pools)

    def with_page(self, page_size: int) -> Shape:
        return replace(self, page_size=page_size)

    def rank_bytes(self, tokens: int, tp_size: int) -> int:
        """Bytes of one request on one rank."""
        total = 0
        for pool in self.pools:
            _, heads = pool.heads_of(tp_size, 0)
            pages = pool.page_count(tokens, self.page_size)
            total += pages * self.page_size * heads * pool.layers * (pool.key_bytes + pool.value_bytes)
        return total


def _hybrid(name: str, full: tuple[int, int, int, int], swa: tuple[int, int, int, int], window: int) -> Shape:
    """full and swa: layers, KV heads, key size, value size (elements of two bytes)."""
    def pool(kind: str, numbers: tuple[int, int, int, int], tokens: int) -> Pool:
        layers, heads, key, value = numbers
        return Pool(kind, layers, heads, 2 * key, 2 * value, tokens)
    return Shape(name, (pool(KV, full, 0), pool(SWA, swa, window)))


GPT_OSS_120B = _hybrid("gpt-oss-120b", (18, 8, 64, 64), (18, 8, 64, 64), 128)
GEMMA_3_27B = _hybrid("gemma-3-27b", (10, 16, 128, 128), (52, 16, 128, 128), 1024)
MIMO_V2_FLASH = _hybrid("mimo-v2-flash", (9, 4, 192, 128), (39, 8, 192, 128), 128)
GEMMA_4_31B = _hybrid("gemma-4-31b", (10, 4, 512, 512), (50, 16, 256, 256), 1024)

# One full layer for five sliding ones is 500 KB and more per token in the Gemma models: a few layers of each
# kind show the same arithmetic.
GEMMA_3_SHORT = GEMMA_3_27B.with_layers(2, 4)
GEMMA_4_SHORT = GEMMA_4_31B.with_layers(2, 4)
MIMO_SHORT = MIMO_V2_FLASH.with_layers(3, 6)
GPT_OSS_SHORT = GPT_OSS_120B.with_layers(4, 4)

ALL = (GPT_OSS_120B, GEMMA_3_27B, MIMO_V2_FLASH, GEMMA_4_31B)
