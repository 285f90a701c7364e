/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy plan: which bytes of the source rank's tensors go where in the destination rank's, for one chunk of one
 * component. One strided-copy descriptor per tensor pair and one list of item pairs shared by all of them, so its size
 * grows with layers + pages, never with tokens x layers. Every transport executes this one type.
 *
 * Byte b of block k of the pair (si, di) moves
 *     from src_base + si * src_item_stride + k * src_block_stride + b
 *     to   dst_base + di * dst_item_stride + k * dst_block_stride + b        0 <= b < block_len, 0 <= k < block_count
 * The canonical order of the bytes, in which they cross a staging buffer or a stream, is copy by copy, within it pair
 * by pair, within it block by block.
 */
#ifndef KVS_POLICY_PLAN_H
#define KVS_POLICY_PLAN_H

#include "layout.h"
#include "verdict.h"

struct kvs_item_pair {
	uint32_t src;
	uint32_t dst;
};

struct kvs_copy {
	uint32_t src_tensor; /* index in the source component's tensors */
	uint32_t dst_tensor; /* index in the destination component's tensors */
	uint64_t src_base;   /* source tensor address (0 when it is the peer's) + offset of the slice in an item */
	uint64_t dst_base;   /* the same of the destination, with the offset of the slot */
	uint64_t src_item_stride;
	uint64_t dst_item_stride;
	uint64_t src_block_stride;
	uint64_t dst_block_stride;
	uint64_t block_len;
	uint64_t block_count;  /* per item */
	uint64_t stream_start; /* position of this copy's first byte in the canonical order */
};

struct kvs_plan {
	uint32_t copy_count;
	uint32_t pair_count;
	struct kvs_copy *copies;
	struct kvs_item_pair *pairs;
	uint64_t bytes; /* that the plan moves in all */
	uint64_t runs;  /* contiguous pieces, after merging neighbours that are contiguous on both sides */
};

/*
 * Build the plan of one chunk. src_items and dst_items are the chunk's item indexes on each side, paired by position;
 * lists of different length are cut to the common prefix or refused, by the component's rule (policy/state.h). Every
 * item is checked against the registered length of every tensor on both sides. A block that covers whole items on both
 * sides is one block per item. At KVS_ACT_SKIP the plan has no copies. Equal TP is planned as with splice_equal_tp.
 *
 * Sets *plan_p (owned by the caller, kvs_plan_free) and returns true, verdict_p holding the component's verdict; or
 * returns false, *plan_p NULL, with verdict_p saying why (KVS_REFUSE_LAYOUT with text "out of memory" when it is that).
 * Pure but for malloc; any thread; needs about 150 KiB of stack. Both sides of a transfer build the same plan from the
 * same layouts and lists.
 */
bool kvs_plan_build(const struct kvs_layout *prefill, const struct kvs_layout *decode, uint32_t component,
                    const int32_t *src_items, uint32_t src_count, const int32_t *dst_items, uint32_t dst_count,
                    struct kvs_plan **plan_p, struct kvs_verdict *verdict_p);

/* NULL is accepted. */
void kvs_plan_free(struct kvs_plan *plan);

/*
 * Walk a plan's runs in canonical order, merged where both sides are contiguous, from any byte offset of the stream.
 * Several iterators over one plan are independent; the plan must outlive them.
 */
struct kvs_plan_iter {
	const struct kvs_plan *plan;
	uint32_t copy;
	uint32_t pair;
	uint64_t block;
	uint64_t offset; /* within the block */
};

struct kvs_run {
	uint64_t src;
	uint64_t dst;
	uint64_t len;
	uint32_t src_tensor;
	uint32_t dst_tensor;
};

/* Start at byte position (0 .. bytes) of the canonical stream; past the end there is no run. O(log copy_count). */
void kvs_plan_seek(struct kvs_plan_iter *iter, const struct kvs_plan *plan, uint64_t position);

/* The next run of at most limit bytes; false at the end, and for limit 0. O(items in the run). */
bool kvs_plan_next(struct kvs_plan_iter *iter, uint64_t limit, struct kvs_run *run_p);

#endif
