/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_CONNECTORS_ORDER_H
#define KVS_CONNECTORS_ORDER_H

#include "sglang.h"

/*
 * The page order of head-sharded pools. From 0.5.22 kv_args says it for the sliding-window pool; before, the switches
 * that change it are environment variables (SGLang mem_cache/memory_pool.py, SGLANG_USE_HND_KVCACHE and, on ROCm,
 * SGLANG_AITER_KV_CACHE_LAYOUT). KVS_ORDER_UNKNOWN where it cannot be told. The component has its tensors already.
 * Interpreter lock held; no exception is left set.
 */
enum kvs_page_order kvs_sglang_page_order(KvsPyObject *kv_args, const struct kvs_component *c, uint32_t page_size);

#endif
