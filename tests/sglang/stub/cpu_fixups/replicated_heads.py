# SPDX-License-Identifier: Apache-2.0
"""Optional: KV heads are replicated when the tensor-parallel size exceeds them, as on a GPU.

A CPU server pads them with zero heads instead, with the same item lengths and head counts but another meaning. Telling
SGLang that the count is aligned leaves out the padding; its loaders then replicate.
"""
from __future__ import annotations

from types import ModuleType
from typing import Any


def _replicate(module: ModuleType) -> None:
    original = getattr(module, "adjust_config_with_unaligned_cpu_tp")

    def adjust(model_config: Any, load_config: Any, tp_size: int) -> Any:
        heads = model_config.get_total_num_kv_heads()
        if heads >= tp_size or tp_size % heads or model_config.num_attention_heads % tp_size:
            return original(model_config, load_config, tp_size)
        model_config.get_total_num_kv_heads = lambda: tp_size
        try:
            adjusted = original(model_config, load_config, tp_size)
        finally:
            del model_config.get_total_num_kv_heads
        for config in (adjusted.hf_config, adjusted.hf_text_config):
            config.original_total_num_kv_heads = heads
        return adjusted

    setattr(module, "adjust_config_with_unaligned_cpu_tp", adjust)


AFTER = {"sglang.srt.configs.update_config": _replicate}
