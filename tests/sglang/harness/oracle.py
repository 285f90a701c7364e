# SPDX-License-Identifier: Apache-2.0
"""What every byte must be: a value of its own for each request, buffer, token, head and byte; a canary elsewhere."""
from __future__ import annotations

import mmap
from typing import Optional, Sequence

import numpy as np
import numpy.typing as npt

from . import gpu
from .shapes import CANARY, Pool

GUARD = 4096

Bytes = npt.NDArray[np.uint8]
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finaliser of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def unsharded(room: int, component: int, entry: int, first_token: int, tokens: int, first_head: int, heads: int,
              head_bytes: int) -> Bytes:
    """[token][head][byte] of the whole model's tensor, in 64-bit words that differ in all their bytes."""
    seed = _mix(_mix(room) ^ (component << 32) ^ entry)
    token = np.arange(first_token, first_token + tokens, dtype=np.uint64)[:, None, None]
    head = np.arange(first_head, first_head + heads, dtype=np.uint64)[None, :, None]
    word = np.arange(head_bytes // 8, dtype=np.uint64)[None, None, :]
    with np.errstate(over="ignore"):
        key = (token * np.uint64(0x9E3779B97F4A7C15)) ^ (head * np.uint64(0xD6E8FEB86659FD93)) ^ np.uint64(seed)
        value = key + word * np.uint64(0xA0761D6478BD642F)
        value ^= value >> np.uint64(32)
        value *= np.uint64(0xD6E8FEB86659FD93)
        value ^= value >> np.uint64(29)
    return value.view(np.uint8).reshape(tokens, heads, head_bytes)


class Buffer:
    """One registered tensor of a rank, between guard zones."""

    def __init__(self, pool: Pool, entry: int, pages: int, page_size: int, first_head: int, heads: int,
                 fill: int, reserve_only: bool = False) -> None:
        self.entry, self.page_size, self.first_head, self.heads = entry, page_size, first_head, heads
        self.head_bytes = pool.entry_bytes(entry)
        self.item_len = page_size * heads * self.head_bytes
        self.pages = pages
        size = pages * self.item_len
        # Untouched pages of a reserved buffer read as zero: its canary is zero and costs no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (getattr(mmap, "MAP_NORESERVE", 0x4000) if reserve_only else 0)
        on_gpu = gpu.allocate(size + 2 * GUARD)
        whole: Bytes = np.frombuffer(mmap.mmap(-1, size + 2 * GUARD, flags=flags), dtype=np.uint8) if on_gpu is None \
            else on_gpu
        self._guards = (whole[:GUARD], whole[GUARD + size:])
        self.data: Bytes = whole[GUARD:GUARD + size].reshape(pages, self.item_len)
        self.fill = 0 if reserve_only else fill
        self.sparse = reserve_only
        for guard in self._guards:
            guard[:] = CANARY
        if not reserve_only:
            self.data[:] = fill

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def size(self) -> int:
        return self.pages * self.item_len

    def expected(self, room: int, component: int, first_page: int, pages: int) -> Bytes:
        values = unsharded(room, component, self.entry, first_page * self.page_size, pages * self.page_size,
                           self.first_head, self.heads, self.head_bytes)
        return values.reshape(pages, self.item_len)

    def write(self, room: int, component: int, items: Sequence[int], first_page: int) -> None:
        self.data[np.asarray(items, dtype=np.int64)] = self.expected(room, component, first_page, len(items))

    def differences(self, component: int, holds: Sequence[tuple[int, Sequence[int], int]]) -> list[str]:
        """holds: (room, items, first page) that must be here; every other byte must be the fill."""
        problems = []
        listed: npt.NDArray[np.bool_] = np.zeros(self.pages, dtype=bool)
        for room, items, first_page in holds:
            index = np.asarray(items, dtype=np.int64)
            listed[index] = True
            if len(index) == 0:
                continue
            want = self.expected(room, component, first_page, len(index))
            got = self.data[index]
            if not np.array_equal(want, got):
                problems.append(self._where(room, component, index, want, got))
        if self.sparse:
            spots = set(range(0, self.pages, max(1, self.pages // 64))) | {self.pages - 1}
            spots |= {page + step for page in np.flatnonzero(listed) for step in (-1, 1)}
            others = np.array(sorted(p for p in spots if 0 <= p < self.pages and not listed[p]), dtype=np.int64)
        else:
            others = np.flatnonzero(~listed)
        for page in others:
            if (self.data[page] != self.fill).any():
                byte = int(np.flatnonzero(self.data[page] != self.fill)[0])
                problems.append(f"component {component} buffer {self.entry}: page {page}, which no list names, was "
                                f"written at byte {byte}")
                break
        if any((guard != CANARY).any() for guard in self._guards):
            problems.append(f"component {component} buffer {self.entry}: written outside the registered memory")
        return problems

    def _where(self, room: int, component: int, index: npt.NDArray[np.int64], want: Bytes, got: Bytes) -> str:
        row, byte = (int(axis[0]) for axis in np.nonzero(want != got))
        token, rest = divmod(byte, self.heads * self.head_bytes)
        head, offset = divmod(rest, self.head_bytes)
        found = "untouched" if got[row, byte] == self.fill else f"{int(got[row, byte]):#04x}"
        wrong = int((want != got).sum())
        return (f"room {room} component {component} buffer {self.entry}: page {int(index[row])} token {token} head "
                f"{self.first_head + head} byte {offset} is {found}, not {int(want[row, byte]):#04x} "
                f"({wrong} of {want.size} bytes are wrong)")


def aux_row(room: int, buffer: int, size: int) -> Bytes:
    words = unsharded(room, 1000, buffer, 0, 1, 0, 1, -(-size // 8) * 8)
    return words.reshape(-1)[:size]


def check_aux(rows: Bytes, buffer: int, holds: Sequence[tuple[int, int]], fill: int) -> Optional[str]:
    """holds: (room, row) that must be here; the other rows must be the fill."""
    want = np.full_like(rows, fill)
    for room, row in holds:
        want[row] = aux_row(room, buffer, rows.shape[1])
    if np.array_equal(want, rows):
        return None
    row = int(np.nonzero((want != rows).any(axis=1))[0][0])
    return f"metadata buffer {buffer}: row {row} is not what it must be"
