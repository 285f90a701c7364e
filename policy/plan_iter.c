/* SPDX-License-Identifier: Apache-2.0 */
/* Walking a plan: from a byte position of its canonical order to addresses. */
#include "plan.h"

#include <string.h>

void kvs_plan_seek(struct kvs_plan_iter *iter, const struct kvs_plan *plan, uint64_t position)
{
	const struct kvs_copy *copy;
	uint32_t low = 0;
	uint32_t high = plan->copy_count;
	uint64_t block;

	memset(iter, 0, sizeof(*iter));
	iter->plan = plan;
	iter->copy = plan->copy_count;
	if (position >= plan->bytes)
		return;
	/* The last copy that starts at or before position. */
	while (high - low > 1) {
		uint32_t middle = low + (high - low) / 2;

		if (plan->copies[middle].stream_start <= position)
			low = middle;
		else
			high = middle;
	}
	copy = &plan->copies[low];
	position -= copy->stream_start;
	block = position / copy->block_len;
	iter->copy = low;
	iter->pair = (uint32_t)(block / copy->block_count);
	iter->block = block % copy->block_count;
	iter->offset = position % copy->block_len;
}

/* Step over a finished block. True: to the next item of the same copy. */
static bool next_item(struct kvs_plan_iter *iter, const struct kvs_copy *copy)
{
	iter->offset = 0;
	if (++iter->block < copy->block_count)
		return false;
	iter->block = 0;
	if (++iter->pair < iter->plan->pair_count)
		return true;
	iter->pair = 0;
	iter->copy++;
	return false;
}

bool kvs_plan_next(struct kvs_plan_iter *iter, uint64_t limit, struct kvs_run *run_p)
{
	const struct kvs_plan *plan = iter->plan;
	const struct kvs_copy *copy;
	const struct kvs_item_pair *pair;
	uint64_t src;
	uint64_t dst;

	if (!limit || iter->copy >= plan->copy_count)
		return false;
	copy = &plan->copies[iter->copy];
	pair = &plan->pairs[iter->pair];
	src = copy->src_base + pair->src * copy->src_item_stride + iter->block * copy->src_block_stride;
	dst = copy->dst_base + pair->dst * copy->dst_item_stride + iter->block * copy->dst_block_stride;
	run_p->src = src + iter->offset;
	run_p->dst = dst + iter->offset;
	run_p->len = 0;
	run_p->src_tensor = copy->src_tensor;
	run_p->dst_tensor = copy->dst_tensor;
	for (;;) {
		uint64_t left = copy->block_len - iter->offset;

		if (left > limit - run_p->len) {
			iter->offset += limit - run_p->len;
			run_p->len = limit;
			return true;
		}
		run_p->len += left;
		if (!next_item(iter, copy))
			return true;
		/* Whole items (one block as long as both strides) that follow each other on both sides are one run. */
		if (copy->block_len != copy->src_item_stride || copy->block_len != copy->dst_item_stride ||
		    pair[1].src != pair[0].src + 1 || pair[1].dst != pair[0].dst + 1)
			return true;
		pair++;
	}
}
