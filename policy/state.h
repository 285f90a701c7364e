/* SPDX-License-Identifier: Apache-2.0 */
/* The components that SGLang's connectors send, and how each is laid out over tensor-parallel ranks: one row each. */
#ifndef KVS_POLICY_STATE_H
#define KVS_POLICY_STATE_H

#include <stdbool.h>

enum kvs_sharding {
	KVS_SHARD_HEADS, /* each rank holds its KV heads: sliced by item length */
	KVS_SHARD_WHOLE, /* each rank holds the same bytes: copied whole from one rank of the group; page items whose
	                    lengths differ are not that after all, and are sliced as heads are */
	KVS_SHARD_OTHER, /* not ours: left to the connector */
};

enum kvs_item_unit {
	KVS_ITEM_PAGE, /* page_size tokens */
	KVS_ITEM_ROW,  /* something else (a ring slot, a request's state): no token rows to slice in it */
};

enum kvs_index_rule {
	KVS_INDEX_TRUNCATE, /* lists may differ in length: the common prefix is sent (upstream's rule for pages) */
	KVS_INDEX_EXACT,    /* lists must be of equal length: position carries meaning */
};

/* name, sharding, item unit, index rule. Sources: SGLang mooncake/conn.py maybe_send_extra and
 * _requires_exact_state_index_match, 0.5.18 and 0.5.23; pools in mem_cache/. Left to the connector: mamba, which it
 * slices itself, and dsa_tail, of MLA models only, which every rank sends whole. c128_state is the value of what is
 * called C128_STATE, later DSV4_REQUEST_STATE; nsa is what 0.5.12 calls dsa. */
#define KVS_STATE_TABLE(X) \
	X("kv", KVS_SHARD_HEADS, KVS_ITEM_PAGE, KVS_INDEX_TRUNCATE) \
	X("swa", KVS_SHARD_HEADS, KVS_ITEM_PAGE, KVS_INDEX_TRUNCATE) \
	X("block_scale", KVS_SHARD_HEADS, KVS_ITEM_PAGE, KVS_INDEX_TRUNCATE) \
	X("block_scale_swa", KVS_SHARD_HEADS, KVS_ITEM_PAGE, KVS_INDEX_TRUNCATE) \
	X("minimax_dense_kv", KVS_SHARD_HEADS, KVS_ITEM_PAGE, KVS_INDEX_EXACT) \
	X("minimax_index_k", KVS_SHARD_WHOLE, KVS_ITEM_PAGE, KVS_INDEX_TRUNCATE) \
	X("swa_ring", KVS_SHARD_WHOLE, KVS_ITEM_ROW, KVS_INDEX_EXACT) \
	X("c128_state", KVS_SHARD_WHOLE, KVS_ITEM_ROW, KVS_INDEX_EXACT) \
	X("request_row", KVS_SHARD_WHOLE, KVS_ITEM_ROW, KVS_INDEX_EXACT) \
	X("qsa_pending", KVS_SHARD_WHOLE, KVS_ITEM_ROW, KVS_INDEX_EXACT) \
	X("qsa_compressed", KVS_SHARD_WHOLE, KVS_ITEM_ROW, KVS_INDEX_EXACT) \
	X("nsa", KVS_SHARD_WHOLE, KVS_ITEM_PAGE, KVS_INDEX_TRUNCATE) \
	X("dsa", KVS_SHARD_WHOLE, KVS_ITEM_PAGE, KVS_INDEX_TRUNCATE) \
	X("dsa_tail", KVS_SHARD_OTHER, KVS_ITEM_ROW, KVS_INDEX_EXACT) \
	X("mamba", KVS_SHARD_OTHER, KVS_ITEM_ROW, KVS_INDEX_EXACT)

struct kvs_state_row {
	const char *name;
	enum kvs_sharding sharding;
	enum kvs_item_unit unit;
	enum kvs_index_rule index_rule;
};

/* The row of a StateType value; NULL: unknown, so not ours. Pure; any thread. */
const struct kvs_state_row *kvs_state_find(const char *type);

#endif
