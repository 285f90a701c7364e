/* SPDX-License-Identifier: Apache-2.0 */
/* Which source tensor goes to which destination tensor. */
#include <stdlib.h>

#include "judge.h"

/* Tensors sorted by layer id, those of one layer in their order: (layer id << 32) | index. */
struct layer_order {
	uint64_t keys[KVS_MAX_TENSORS];
	uint32_t count;
};

static uint32_t key_layer(uint64_t key)
{
	return (uint32_t)(key >> 32);
}

static int key_compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a;
	uint64_t y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static void layer_sort(const struct kvs_component *component, struct layer_order *order_p)
{
	uint32_t i;

	for (i = 0; i < component->tensor_count; i++)
		order_p->keys[i] = (uint64_t)(uint32_t)component->tensors[i].layer_id << 32 | i;
	order_p->count = component->tensor_count;
	qsort(order_p->keys, order_p->count, sizeof(order_p->keys[0]), key_compare);
}

/* How many tensors from position on belong to the layer. */
static uint32_t layer_run(const struct layer_order *order, uint32_t position, uint32_t layer)
{
	uint32_t end = position;

	while (end < order->count && key_layer(order->keys[end]) == layer)
		end++;
	return end - position;
}

/* same_stage: both ranks are the same stage of equal pipelines, so that each must have what the other has. */
static bool pair_by_layer(struct kvs_case *c, bool same_stage, uint32_t *pair_p)
{
	bool src_part = c->prefill->pp_size > 1 && !same_stage;
	bool dst_part = c->decode->pp_size > 1 && !same_stage;
	struct layer_order src;
	struct layer_order dst;
	uint32_t s = 0;
	uint32_t d = 0;

	layer_sort(c->src, &src);
	layer_sort(c->dst, &dst);
	while (s < src.count || d < dst.count) {
		uint32_t layer = UINT32_MAX;
		uint32_t src_run;
		uint32_t dst_run;
		uint32_t i;

		if (s < src.count)
			layer = key_layer(src.keys[s]);
		if (d < dst.count && key_layer(dst.keys[d]) < layer)
			layer = key_layer(dst.keys[d]);
		src_run = layer_run(&src, s, layer);
		dst_run = layer_run(&dst, d, layer);
		/* Only a pipeline explains a layer that one side lacks altogether. */
		if (src_run != dst_run && !(!src_run && src_part) && !(!dst_run && dst_part))
			return kvs_case_refuse(c, KVS_REFUSE_TENSORS,
			                       "layer %u has %u tensors on the prefill and %u on the decode", layer,
			                       src_run, dst_run);
		for (i = 0; i < dst_run; i++)
			pair_p[(uint32_t)dst.keys[d + i]] = src_run ? (uint32_t)src.keys[s + i] : KVS_UNPAIRED;
		s += src_run;
		d += dst_run;
	}
	return true;
}

static bool has_layer_ids(const struct kvs_component *component)
{
	uint32_t i;

	for (i = 0; i < component->tensor_count; i++)
		if (component->tensors[i].layer_id == KVS_NO_LAYER)
			return false;
	return true;
}

bool kvs_case_pair(struct kvs_case *c, uint32_t *pair_p)
{
	const struct kvs_layout *prefill = c->prefill;
	const struct kvs_layout *decode = c->decode;
	bool pipeline = prefill->pp_size > 1 || decode->pp_size > 1;
	bool same_stage = prefill->pp_size == decode->pp_size && prefill->pp_rank == decode->pp_rank;
	uint32_t i;

	if ((pipeline || c->src->tensor_count != c->dst->tensor_count) && has_layer_ids(c->src) &&
	    has_layer_ids(c->dst))
		return pair_by_layer(c, same_stage, pair_p);
	/* Without ids the same stage of equal pipelines holds the same layers; of anything else nobody can tell. */
	if (!same_stage)
		return kvs_case_refuse(c, KVS_REFUSE_LAYER_IDS,
		                       "prefill stage %u of %u and decode stage %u of %u, and no layer ids to tell "
		                       "which of the %u and %u tensors belong together",
		                       prefill->pp_rank, prefill->pp_size, decode->pp_rank, decode->pp_size,
		                       c->src->tensor_count, c->dst->tensor_count);
	if (c->src->tensor_count != c->dst->tensor_count)
		return kvs_case_refuse(c, KVS_REFUSE_TENSORS,
		                       "%u tensors on the prefill, %u on the decode, and no layer ids",
		                       c->src->tensor_count, c->dst->tensor_count);
	for (i = 0; i < c->dst->tensor_count; i++)
		pair_p[i] = i;
	return true;
}

bool kvs_policy_pair(const struct kvs_layout *prefill, const struct kvs_layout *decode, uint32_t component,
                     uint32_t *pair_p, struct kvs_verdict *verdict_p)
{
	struct kvs_case c;

	return kvs_case_open(&c, prefill, decode, component, verdict_p) && kvs_case_pair(&c, pair_p);
}
