# SPDX-License-Identifier: Apache-2.0
"""SGLang's own pool of a hybrid model, over the test's memory: what a server has and registers no word of."""
from __future__ import annotations

from typing import Any, Sequence


def hybrid_pool(page_size: int, layers: Sequence[Sequence[int]], components: Sequence[Sequence[Any]]) -> Any:
    """layers: global ones of this rank's full attention, and of its sliding window; components: their buffers."""
    import torch
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    given = iter(components)    # the pool makes that of full attention first

    class Pool:
        """In place of an MHA pool: memory is what it is there for."""

        post_capture_active = False

        def __init__(self, **_: Any) -> None:
            self.buffers = next(given)

        def get_kv_size_bytes(self) -> tuple[int, int]:
            return 0, 0     # for a line in the log

        def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
            return ([buffer.address for buffer in self.buffers], [buffer.size for buffer in self.buffers],
                    [buffer.item_len for buffer in self.buffers])

    return SWAKVPool(size=page_size, size_swa=page_size, page_size=page_size, dtype=torch.bfloat16, head_num=1,
                     head_dim=8, full_attention_layer_ids=list(layers[0]), swa_attention_layer_ids=list(layers[1]),
                     device="cpu", token_to_kv_pool_class=Pool)
