/* SPDX-License-Identifier: Apache-2.0 */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

#include "judge.h"

struct item_lists {
	const int32_t *src;
	const int32_t *dst;
	uint32_t count;
};

/* Everything that is refused is refused before anything is allocated. */
struct build {
	struct kvs_case c;
	struct item_lists items;
	int32_t src_max;
	int32_t dst_max;
	uint32_t pairs[KVS_MAX_TENSORS];
	struct kvs_split splits[KVS_MAX_TENSORS];
};

static bool lists_fit(struct build *b, uint32_t src_count, uint32_t dst_count)
{
	uint32_t i;

	if (src_count != dst_count && b->c.row->index_rule == KVS_INDEX_EXACT)
		return kvs_case_refuse(&b->c, KVS_REFUSE_INDICES,
		                       "%u items on the prefill, %u on the decode, where position carries meaning",
		                       src_count, dst_count);
	b->items.count = src_count < dst_count ? src_count : dst_count;
	if (b->items.count && (!b->items.src || !b->items.dst))
		return kvs_case_refuse(&b->c, KVS_REFUSE_INDICES, "%u items, but no list of them", b->items.count);
	for (i = 0; i < b->items.count; i++) {
		if (b->items.src[i] < 0 || b->items.dst[i] < 0)
			return kvs_case_refuse(&b->c, KVS_REFUSE_INDICES,
			                       "entry %u of the item lists is %d on the prefill, %d on the decode", i,
			                       b->items.src[i], b->items.dst[i]);
		if (b->items.src[i] > b->src_max)
			b->src_max = b->items.src[i];
		if (b->items.dst[i] > b->dst_max)
			b->dst_max = b->items.dst[i];
	}
	return true;
}

static bool tensor_holds(struct build *b, const char *side, const struct kvs_tensor *tensor, uint32_t index,
                         int32_t item)
{
	if (!b->items.count || !tensor->item_len || (uint64_t)item < tensor->length / tensor->item_len)
		return true;
	return kvs_case_refuse(&b->c, KVS_REFUSE_INDICES, "item %d of tensor %u of the %s, which has only %llu", item,
	                       index, side, (unsigned long long)(tensor->length / tensor->item_len));
}

static bool items_in_bounds(struct build *b)
{
	const struct kvs_component *src = b->c.src;
	const struct kvs_component *dst = b->c.dst;
	uint32_t i;

	for (i = 0; i < dst->tensor_count; i++) {
		uint32_t s = b->pairs[i];

		if (s == KVS_UNPAIRED)
			continue;
		b->c.src_length = src->tensors[s].item_len;
		b->c.dst_length = dst->tensors[i].item_len;
		if (!tensor_holds(b, "prefill", &src->tensors[s], s, b->src_max) ||
		    !tensor_holds(b, "decode", &dst->tensors[i], i, b->dst_max))
			return false;
	}
	return true;
}

static void copy_set(const struct build *b, uint32_t dst_tensor, struct kvs_copy *copy_p)
{
	const struct kvs_tensor *dst = &b->c.dst->tensors[dst_tensor];
	const struct kvs_tensor *src = &b->c.src->tensors[b->pairs[dst_tensor]];
	const struct kvs_split *split = &b->splits[dst_tensor];
	/* The side with the shorter item has it whole; a block per token unless whole items or heads lie together. */
	uint64_t shorter = src->item_len < dst->item_len ? src->item_len : dst->item_len;
	uint64_t blocks = split->n > 1 && b->c.src->order == KVS_ORDER_NHD ? b->c.prefill->page_size : 1;
	uint64_t offset = split->index * (shorter / blocks);

	memset(copy_p, 0, sizeof(*copy_p));
	copy_p->src_tensor = b->pairs[dst_tensor];
	copy_p->dst_tensor = dst_tensor;
	copy_p->src_base = src->address;
	copy_p->dst_base = dst->address;
	if (split->n > 1 && b->c.decode_larger)
		copy_p->src_base += offset;
	else if (split->n > 1)
		copy_p->dst_base += offset;
	copy_p->src_item_stride = src->item_len;
	copy_p->dst_item_stride = dst->item_len;
	copy_p->src_block_stride = src->item_len / blocks;
	copy_p->dst_block_stride = dst->item_len / blocks;
	copy_p->block_len = shorter / blocks;
	copy_p->block_count = blocks;
}

/* Only whole items can join: a slice is never next to the following one on the side that it is cut from. */
static uint64_t joined_items(const struct item_lists *items)
{
	uint64_t runs = items->count ? 1 : 0;
	uint32_t i;

	for (i = 1; i < items->count; i++)
		if (items->src[i] - 1 != items->src[i - 1] || items->dst[i] - 1 != items->dst[i - 1])
			runs++;
	return runs;
}

static bool plan_fill(struct build *b, struct kvs_plan *plan)
{
	uint64_t whole_runs = joined_items(&b->items);
	uint32_t i;

	for (i = 0; i < b->items.count; i++) {
		plan->pairs[i].src = (uint32_t)b->items.src[i];
		plan->pairs[i].dst = (uint32_t)b->items.dst[i];
	}
	plan->pair_count = b->items.count;
	for (i = 0; i < b->c.dst->tensor_count; i++) {
		struct kvs_copy *copy = &plan->copies[plan->copy_count];
		uint64_t bytes;

		if (b->splits[i].skip)
			continue;
		copy_set(b, i, copy);
		copy->stream_start = plan->bytes;
		if (__builtin_mul_overflow(copy->block_len * copy->block_count, (uint64_t)plan->pair_count, &bytes) ||
		    __builtin_add_overflow(plan->bytes, bytes, &plan->bytes))
			return kvs_case_refuse(&b->c, KVS_REFUSE_INDICES,
			                       "%u items in %u tensors are more than 2^64 "
			                       "bytes",
			                       plan->pair_count, b->c.dst->tensor_count);
		plan->runs += b->splits[i].n > 1 ? plan->pair_count * copy->block_count : whole_runs;
		plan->copy_count++;
	}
	return true;
}

static bool out_of_memory(struct kvs_verdict *verdict_p)
{
	verdict_p->action = KVS_ACT_REFUSE;
	verdict_p->refusal = KVS_REFUSE_LAYOUT;
	kvs_text_set(&verdict_p->text, "out of memory");
	return false;
}

static bool plan_make(struct build *b, struct kvs_plan **plan_p)
{
	struct kvs_plan *plan = calloc(1, sizeof(*plan));

	if (!plan)
		return out_of_memory(b->c.verdict);
	plan->copies = calloc((size_t)b->c.dst->tensor_count + 1, sizeof(*plan->copies));
	plan->pairs = malloc(((size_t)b->items.count + 1) * sizeof(*plan->pairs));
	if (!plan->copies || !plan->pairs) {
		kvs_plan_free(plan);
		return out_of_memory(b->c.verdict);
	}
	if (!plan_fill(b, plan)) {
		kvs_plan_free(plan);
		return false;
	}
	*plan_p = plan;
	return true;
}

bool kvs_plan_build(const struct kvs_layout *prefill, const struct kvs_layout *decode, uint32_t component,
                    const int32_t *src_items, uint32_t src_count, const int32_t *dst_items, uint32_t dst_count,
                    struct kvs_plan **plan_p, struct kvs_verdict *verdict_p)
{
	struct build b;

	*plan_p = NULL;
	b.items = (struct item_lists){.src = src_items, .dst = dst_items};
	b.src_max = 0;
	b.dst_max = 0;
	return kvs_case_open(&b.c, prefill, decode, component, verdict_p) && kvs_case_decide(&b.c, b.pairs, b.splits) &&
	       lists_fit(&b, src_count, dst_count) && items_in_bounds(&b) && plan_make(&b, plan_p);
}

void kvs_plan_free(struct kvs_plan *plan)
{
	if (!plan)
		return;
	free(plan->copies);
	free(plan->pairs);
	free(plan);
}
