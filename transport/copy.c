/* SPDX-License-Identifier: Apache-2.0 */
#include "copy.h"

#include <inttypes.h>
#include <string.h>

/*
 * Block by block with the C library's memcpy: loops of our own for the usual run lengths (128 bytes to 1 KiB), with and
 * without prefetching, were measured to be slower by up to a half.
 */
static void copy_blocks(uint8_t *to, const uint8_t *from, uint64_t to_stride, uint64_t from_stride, uint64_t count,
                        uint64_t block_len)
{
	if (to_stride == block_len && from_stride == block_len) {
		memcpy(to, from, count * block_len);
		return;
	}
	for (; count > 0; count--) {
		memcpy(to, from, block_len);
		to += to_stride;
		from += from_stride;
	}
}

static uint8_t *at(uint64_t address)
{
	return (uint8_t *)(uintptr_t)address;
}

/* The strided place of a cursor on one side. */
static uint64_t place(const struct kvs_copy *copy, const struct kvs_plan *plan, const struct kvs_cursor *cursor,
                      enum kvs_side side)
{
	const struct kvs_item_pair *pair = &plan->pairs[cursor->pair];
	if (side == KVS_SIDE_SOURCE)
		return copy->src_base + pair->src * copy->src_item_stride + cursor->block * copy->src_block_stride;
	return copy->dst_base + pair->dst * copy->dst_item_stride + cursor->block * copy->dst_block_stride;
}

static void advance(const struct kvs_plan *plan, struct kvs_cursor *cursor, uint64_t blocks)
{
	cursor->offset = 0;
	cursor->block += blocks;
	if (cursor->block < plan->copies[cursor->copy].block_count)
		return;
	cursor->block = 0;
	if (++cursor->pair < plan->pair_count)
		return;
	cursor->pair = 0;
	cursor->copy++;
}

static inline __attribute__((always_inline)) size_t walk(const struct kvs_plan *plan, struct kvs_cursor *cursor,
                                                         uint8_t *linear, size_t size, enum kvs_side side)
{
	size_t left = size;
	while (left > 0 && plan->pair_count > 0 && cursor->copy < plan->copy_count) {
		const struct kvs_copy *copy = &plan->copies[cursor->copy];
		uint8_t *strided = at(place(copy, plan, cursor, side));
		uint64_t stride = side == KVS_SIDE_SOURCE ? copy->src_block_stride : copy->dst_block_stride;
		uint64_t blocks = cursor->offset == 0 ? left / copy->block_len : 0;
		if (blocks > 0) {
			if (blocks > copy->block_count - cursor->block)
				blocks = copy->block_count - cursor->block;
			if (side == KVS_SIDE_SOURCE)
				copy_blocks(linear, strided, copy->block_len, stride, blocks, copy->block_len);
			else
				copy_blocks(strided, linear, stride, copy->block_len, blocks, copy->block_len);
			linear += blocks * copy->block_len;
			left -= blocks * copy->block_len;
			advance(plan, cursor, blocks);
			continue;
		}
		/* A block that begins or ends outside this piece. */
		uint64_t part = copy->block_len - cursor->offset;
		if (part > left)
			part = left;
		if (side == KVS_SIDE_SOURCE)
			memcpy(linear, strided + cursor->offset, part);
		else
			memcpy(strided + cursor->offset, linear, part);
		linear += part;
		left -= part;
		cursor->offset += part;
		if (cursor->offset == copy->block_len)
			advance(plan, cursor, 1);
	}
	return size - left;
}

size_t kvs_copy_pack(const struct kvs_plan *plan, struct kvs_cursor *cursor, void *linear_p, size_t size)
{
	return walk(plan, cursor, linear_p, size, KVS_SIDE_SOURCE);
}

size_t kvs_copy_unpack(const struct kvs_plan *plan, struct kvs_cursor *cursor, const void *linear, size_t size)
{
	/* Only read from: walk serves both directions with one pointer. */
	return walk(plan, cursor, (uint8_t *)(uintptr_t)linear, size, KVS_SIDE_DESTINATION);
}

uint64_t kvs_copy_run(const struct kvs_plan *plan, const struct kvs_cursor *cursor, enum kvs_side side)
{
	if (cursor->copy >= plan->copy_count)
		return 0;
	const struct kvs_copy *copy = &plan->copies[cursor->copy];
	uint64_t stride = side == KVS_SIDE_SOURCE ? copy->src_block_stride : copy->dst_block_stride;
	uint64_t blocks = stride == copy->block_len ? copy->block_count - cursor->block : 1;
	return blocks * copy->block_len - cursor->offset;
}

uint32_t kvs_copy_runs(const struct kvs_plan *plan, const struct kvs_cursor *cursor, enum kvs_side side, size_t size,
                       struct iovec *runs_p, uint32_t most)
{
	struct kvs_cursor at_run = *cursor;
	uint32_t count = 0;
	while (size > 0 && plan->pair_count > 0 && at_run.copy < plan->copy_count) {
		const struct kvs_copy *copy = &plan->copies[at_run.copy];
		uint8_t *start = at(place(copy, plan, &at_run, side)) + at_run.offset;
		uint64_t length = kvs_copy_run(plan, &at_run, side);
		if (length > size)
			length = size;
		struct iovec *last = count > 0 ? &runs_p[count - 1] : NULL;
		if (last != NULL && (uint8_t *)last->iov_base + last->iov_len == start) {
			last->iov_len += length;
		} else {
			if (count == most)
				break;
			runs_p[count++] = (struct iovec){.iov_base = start, .iov_len = length};
		}
		size -= length;
		kvs_copy_skip(plan, &at_run, length);
	}
	return count;
}

void kvs_copy_skip(const struct kvs_plan *plan, struct kvs_cursor *cursor, uint64_t size)
{
	while (size > 0 && plan->pair_count > 0 && cursor->copy < plan->copy_count) {
		const struct kvs_copy *copy = &plan->copies[cursor->copy];
		uint64_t left = (copy->block_count - cursor->block) * copy->block_len - cursor->offset;
		if (size >= left) {
			advance(plan, cursor, copy->block_count - cursor->block);
			size -= left;
			continue;
		}
		uint64_t within = cursor->offset + size;
		cursor->block += within / copy->block_len;
		cursor->offset = within % copy->block_len;
		return;
	}
}

bool kvs_copy_guard(const struct kvs_plan *plan, enum kvs_side side, const struct kvs_layout *layout,
                    uint32_t component, struct kvs_text *text)
{
	bool source = side == KVS_SIDE_SOURCE;
	uint32_t last = 0;
	for (uint32_t i = 0; i < plan->pair_count; i++) {
		uint32_t item = source ? plan->pairs[i].src : plan->pairs[i].dst;
		last = item > last ? item : last;
	}
	for (uint32_t i = 0; i < plan->copy_count; i++) {
		const struct kvs_copy *copy = &plan->copies[i];
		uint32_t t = source ? copy->src_tensor : copy->dst_tensor;
		uint64_t base = source ? copy->src_base : copy->dst_base, end = 0, blocks = 0;
		bool wraps = component >= layout->component_count || copy->block_count == 0 || copy->block_len == 0 ||
		             t >= layout->components[component].tensor_count;
		wraps = wraps || __builtin_mul_overflow(source ? copy->src_item_stride : copy->dst_item_stride,
		                                        (uint64_t)last, &end);
		wraps = wraps || __builtin_mul_overflow(source ? copy->src_block_stride : copy->dst_block_stride,
		                                        copy->block_count - 1, &blocks);
		wraps = wraps || __builtin_add_overflow(end, blocks, &end) ||
		        __builtin_add_overflow(end, copy->block_len, &end) || __builtin_add_overflow(end, base, &end);
		const struct kvs_tensor *tensor = wraps ? NULL : &layout->components[component].tensors[t];
		if (wraps || base < tensor->address || end - tensor->address > tensor->length) {
			kvs_text_set(text,
			             "component %" PRIu32 " tensor %" PRIu32
			             ": the copy plan ends outside the registered memory",
			             component, t);
			return false;
		}
	}
	return true;
}
