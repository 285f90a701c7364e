# SPDX-License-Identifier: Apache-2.0
"""Attention for sliding-window models with the torch_native backend, the only one without compiled kernels.

1. It writes to the sliding-window pool at translated locations but reads at untranslated ones, which is right only for as
   long as both numberings agree. A decode's numberings do not: its pages are where the transfer put them.
2. It knows no attention sinks (gpt-oss, MiMo).
3. gpt-oss refuses the backend by name; the AMX backend, which it accepts, has no kernels here, so that name stands for
   torch_native.
"""
from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any, Callable


class _WindowLocations:
    """The request-to-token table, read as locations in the sliding-window pool."""

    def __init__(self, table: Any, pool: Any) -> None:
        self._table, self._pool = table, pool

    def __getitem__(self, key: Any) -> Any:
        return self._pool.translate_loc_from_full_to_swa(self._table[key]).long().clamp_min(0)


def _attend_with_sinks(sinks: Any, query: Any, key: Any, value: Any, mask: Any, scale: Any, causal: bool) -> Any:
    import torch

    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.size(0), -1, scores.size(-2), 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ value


def _native(module: ModuleType) -> None:
    backend = getattr(module, "TorchNativeAttnBackend")
    original: Callable[..., Any] = getattr(module, "scaled_dot_product_attention")
    current: list[Any] = []     # the sinks of the layer in work: the call in between does not pass them on

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, enable_gqa: bool = False,
               scale: Any = None, is_causal: bool = False) -> Any:
        if current:
            return _attend_with_sinks(current[-1], query, key, value, attn_mask, scale, is_causal)
        return original(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, scale=scale,
                        is_causal=is_causal)

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any,
                sinks: Any = None, **kwargs: Any) -> Any:
            pool, requests = self.token_to_kv_pool, self.req_to_token_pool
            mapping = getattr(pool, "layers_mapping", None)
            if mapping is not None and mapping[layer.layer_id][1]:
                self.req_to_token_pool = SimpleNamespace(
                    req_to_token=_WindowLocations(requests.req_to_token, pool))
            if sinks is not None:
                current.append(sinks)
            try:
                return forward(self, q, k, v, layer, forward_batch, *args, **kwargs)
            finally:
                self.req_to_token_pool = requests
                current.clear()
        return run

    setattr(module, "scaled_dot_product_attention", attend)
    backend.forward_extend = wrap(backend.forward_extend)
    backend.forward_decode = wrap(backend.forward_decode)


def _amx_is_native(module: ModuleType) -> None:
    backends = getattr(module, "ATTENTION_BACKENDS")
    backends["intel_amx"] = backends["torch_native"]


AFTER = {
    "sglang.srt.layers.attention.attention_registry": _amx_is_native,
    "sglang.srt.layers.attention.torch_native_backend": _native,
}
