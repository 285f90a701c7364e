/* SPDX-License-Identifier: Apache-2.0 */
#include "order.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "../../policy/state.h"

static bool variable_is_on(const char *name)
{
	const char *value = getenv(name);
	return value && *value && strcmp(value, "0") != 0 && strcasecmp(value, "false") != 0;
}

/*
 * Does each layer have a buffer of K and one of V? Pools that keep both in one buffer (unified memory: one for all
 * layers; MiniMax in NVFP4, 0.5.23: one per layer, scales included) have an order within the page that is neither of
 * the two, and nothing in kv_args says so but the number of buffers and of layer ids.
 */
static bool has_k_and_v(const struct kvs_component *c)
{
	if (c->tensor_count % 2 != 0)
		return false;
	for (uint32_t i = 0; i < c->tensor_count; i++) {
		uint32_t same = 0;
		for (uint32_t k = 0; k < c->tensor_count && c->tensors[i].layer_id != KVS_NO_LAYER; k++)
			same += c->tensors[k].layer_id == c->tensors[i].layer_id;
		if (same % 2 != 0)
			return false;
	}
	return true;
}

enum kvs_page_order kvs_sglang_page_order(KvsPyObject *kv_args, const struct kvs_component *c, uint32_t page_size)
{
	const struct kvs_state_row *row = kvs_state_find(c->type);
	if (row && row->sharding == KVS_SHARD_HEADS && !has_k_and_v(c))
		return KVS_ORDER_UNKNOWN;
	/* Scales of 128-token pages are interleaved for the attention kernel, in an order that is neither of the two.
	 */
	if (strncmp(c->type, "block_scale", strlen("block_scale")) == 0 && page_size == 128)
		return KVS_ORDER_UNKNOWN;
	char order[KVS_NAME_SIZE];
	if (kvs_py_attr_text(kv_args, "swa_kv_cache_layout", order, sizeof order)) {
		if (strcmp(order, "nhd") == 0)
			return KVS_ORDER_NHD;
		return strcmp(order, "hnd") == 0 ? KVS_ORDER_HND : KVS_ORDER_UNKNOWN;
	}
	const char *aiter = getenv("SGLANG_AITER_KV_CACHE_LAYOUT");
	if (aiter && *aiter && strcasecmp(aiter, "nhd") != 0)
		return KVS_ORDER_UNKNOWN;
	return variable_is_on("SGLANG_USE_HND_KVCACHE") ? KVS_ORDER_HND : KVS_ORDER_NHD;
}
