# SPDX-License-Identifier: Apache-2.0
"""Pages of more than one token: up to 0.5.21 their allocation is a Triton kernel, for which there is no CPU driver.

0.5.23 has a torch path for the same that it takes by itself, and there this changes nothing.
"""
from __future__ import annotations

from types import ModuleType
from typing import Any, Callable


class _Kernel:
    """Started like a Triton kernel, kernel[grid](...), and run as a function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def _alloc_decode(seq_lens: Any, last_loc: Any, free_pages: Any, out_indices: Any, _batch: int,
                  page_size: int) -> None:
    """One token for each request: the next place in its page, or the first one of a new page."""
    import torch

    opens_page = (seq_lens - 1) % page_size == 0
    number = torch.cumsum(opens_page.long(), 0) - 1
    out_indices.copy_(last_loc + 1)
    out_indices[opens_page] = free_pages[number[opens_page]].to(out_indices.dtype) * page_size


def _without_triton(module: ModuleType) -> None:
    naive: Callable[..., None] = getattr(module, "alloc_extend_naive")

    def alloc_extend(prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, out_indices: Any, _batch: int,
                     page_size: int) -> None:
        naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device)

    setattr(module, "alloc_extend_kernel", _Kernel(alloc_extend))
    setattr(module, "alloc_decode_kernel", _Kernel(_alloc_decode))


AFTER = {"sglang.srt.mem_cache.allocator.paged": _without_triton}
