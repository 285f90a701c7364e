/* SPDX-License-Identifier: Apache-2.0 */
/* What a server's own pool knows of its buffers and no release registers. */
#ifndef KVS_CONNECTORS_POOLS_H
#define KVS_CONNECTORS_POOLS_H

#include "../../policy/layout.h"

/*
 * Give the KV and sliding-window buffers of a hybrid model their global layers: kv_args has none for such models, up to
 * 0.5.23, and only the pool (SWAKVPool.layers_mapping, the same since 0.5.12) knows which layers a pipeline stage has
 * of each kind. Called while SGLang makes the manager, whose pool is found in the function that does so
 * (_init_kv_manager); buffers are told by their addresses. Whatever is not as expected leaves the buffers without
 * layers. With the interpreter lock held; leaves no exception set.
 */
void kvs_pools_layer_ids(struct kvs_layout *layout);

#endif
