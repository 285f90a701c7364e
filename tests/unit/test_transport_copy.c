/* SPDX-License-Identifier: Apache-2.0 */
/* Packing and unpacking in pieces of any size against the plan's own iterator, and the guard in front of memory. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "support/random.h"
#include "support/shapes.h"
#include "transport/copy.h"
#include "transport/itemset.h"

#define ITEMS 12

static void give_memory(struct kvs_layout *layout)
{
	for (uint32_t t = 0; t < layout->components[0].tensor_count; t++) {
		struct kvs_tensor *tensor = &layout->components[0].tensors[t];
		uint64_t *words = malloc(tensor->length);
		cr_assert(words != NULL);
		for (uint64_t i = 0; i < tensor->length / 8; i++)
			words[i] = test_mix(tensor->address + i + t * 1000003);
		tensor->address = (uint64_t)(uintptr_t)words;
	}
}

static void free_memory(struct kvs_layout *layout)
{
	for (uint32_t t = 0; t < layout->components[0].tensor_count; t++)
		free((void *)(uintptr_t)layout->components[0].tensors[t].address);
	kvs_layout_free(layout);
}

/* The plan's bytes as its iterator gives them. */
static void reference(const struct kvs_plan *plan, uint8_t *stream)
{
	struct kvs_plan_iter iter;
	struct kvs_run run;
	uint64_t at = 0;
	kvs_plan_seek(&iter, plan, 0);
	while (kvs_plan_next(&iter, UINT64_MAX, &run)) {
		memcpy(stream + at, (const void *)(uintptr_t)run.src, run.len);
		at += run.len;
	}
	cr_assert(at == plan->bytes);
}

/* The stream gathered through the places of its bytes, in pieces of any size and of few places. */
static void check_runs(const struct kvs_plan *plan, const uint8_t *want, uint8_t *got, enum kvs_side side,
                       uint64_t seed)
{
	struct kvs_cursor cursor = {.copy = 0};
	struct iovec runs[8];
	uint64_t at = 0;
	memset(got, 0, plan->bytes);
	while (at < plan->bytes) {
		size_t most = test_random_in(&seed, 1, 20000), size = 0;
		most = most < plan->bytes - at ? most : plan->bytes - at;
		uint32_t count = kvs_copy_runs(plan, &cursor, side, most, runs, (uint32_t)test_random_in(&seed, 1, 8));
		cr_assert(count > 0 && kvs_copy_run(plan, &cursor, side) > 0);
		for (uint32_t i = 0; i < count; i++) {
			cr_assert(size + runs[i].iov_len <= most, "more than was asked for");
			memcpy(got + at + size, runs[i].iov_base, runs[i].iov_len);
			size += runs[i].iov_len;
		}
		/* As after a call that moved some of it. */
		size = test_random_in(&seed, 1, size);
		kvs_copy_skip(plan, &cursor, size);
		at += size;
	}
	cr_expect(memcmp(want, got, plan->bytes) == 0, "places of side %d", (int)side);
	cr_expect(kvs_copy_run(plan, &cursor, side) == 0 && kvs_copy_runs(plan, &cursor, side, 1, runs, 8) == 0,
	          "nothing is left");
}

static void check(uint32_t prefill_tp, uint32_t decode_tp, uint32_t page, uint32_t width, uint64_t seed)
{
	uint32_t heads = 8, v_width = width / 2;
	struct kvs_layout *prefill =
	        shape_kv(prefill_tp, prefill_tp - 1, page, 2, shape_item(heads, prefill_tp, page, width),
	                 shape_item(heads, prefill_tp, page, v_width), ITEMS);
	uint32_t rank = prefill_tp < decode_tp ? decode_tp - 1 : (prefill_tp - 1) * decode_tp / prefill_tp;
	struct kvs_layout *decode = shape_kv(decode_tp, rank, page, 2, shape_item(heads, decode_tp, page, width),
	                                     shape_item(heads, decode_tp, page, v_width), ITEMS);
	static const int32_t src[] = {3, 4, 5, 0, 11}, dst[] = {7, 8, 1, 2, 10};
	struct kvs_plan *plan = NULL;
	struct kvs_verdict verdict;
	struct kvs_text text;
	give_memory(prefill);
	give_memory(decode);
	cr_assert(kvs_plan_build(prefill, decode, 0, src, 5, dst, 5, &plan, &verdict), "%s", verdict.text.s);
	cr_expect(kvs_copy_guard(plan, KVS_SIDE_SOURCE, prefill, 0, &text), "%s", text.s);
	cr_expect(kvs_copy_guard(plan, KVS_SIDE_DESTINATION, decode, 0, &text), "%s", text.s);
	uint8_t *want = malloc(plan->bytes + 1), *got = malloc(plan->bytes + 1), *again = malloc(plan->bytes + 1);
	reference(plan, want);
	struct kvs_cursor cursor = {.copy = 0};
	uint64_t at = 0;
	while (at < plan->bytes) {
		size_t size = test_random_in(&seed, 1, 3 * width * page);
		at += kvs_copy_pack(plan, &cursor, got + at, size < plan->bytes - at ? size : plan->bytes - at);
	}
	cr_expect(memcmp(want, got, plan->bytes) == 0, "pack %u to %u, page %u, width %u", prefill_tp, decode_tp, page,
	          width);
	cr_expect(kvs_copy_pack(plan, &cursor, got, 1) == 0, "nothing is left");
	cursor = (struct kvs_cursor){.copy = 0};
	for (at = 0; at < plan->bytes;) {
		size_t size = test_random_in(&seed, 1, 3 * width * page);
		at += kvs_copy_unpack(plan, &cursor, got + at, size < plan->bytes - at ? size : plan->bytes - at);
	}
	/* Read it back from the destination through the iterator. */
	struct kvs_plan_iter iter;
	struct kvs_run run;
	kvs_plan_seek(&iter, plan, 0);
	for (at = 0; kvs_plan_next(&iter, UINT64_MAX, &run); at += run.len)
		memcpy(again + at, (const void *)(uintptr_t)run.dst, run.len);
	cr_expect(memcmp(want, again, plan->bytes) == 0, "unpack %u to %u, page %u, width %u", prefill_tp, decode_tp,
	          page, width);
	check_runs(plan, want, again, KVS_SIDE_SOURCE, seed);
	check_runs(plan, want, again, KVS_SIDE_DESTINATION, seed);
	free(want);
	free(got);
	free(again);
	kvs_plan_free(plan);
	free_memory(prefill);
	free_memory(decode);
}

Test(transport_copy, against_the_iterator)
{
	static const uint32_t tps[][2] = {{2, 1}, {1, 2}, {4, 1}, {1, 8}, {2, 2}, {8, 4}};
	static const uint32_t pages[] = {1, 3, 16}, widths[] = {16, 32, 64, 128, 192, 256, 1024};
	for (size_t i = 0; i < sizeof(tps) / sizeof(tps[0]); i++)
		for (size_t p = 0; p < 3; p++)
			for (size_t w = 0; w < 7; w++)
				check(tps[i][0], tps[i][1], pages[p], widths[w], i * 100 + p * 10 + w);
}

/* A plan that somehow points past the registered memory is caught, also where the sum would wrap. */
Test(transport_copy, guard)
{
	struct kvs_layout *layout = shape_kv(1, 0, 1, 1, 1000, 0, ITEMS);
	struct kvs_item_pair pair = {.src = 0, .dst = ITEMS - 1};
	struct kvs_copy copy = {.src_base = 0x10000,
	                        .dst_base = 0x10000,
	                        .src_item_stride = 1000,
	                        .dst_item_stride = 1000,
	                        .block_len = 1000,
	                        .block_count = 1};
	struct kvs_plan plan = {.copy_count = 1, .pair_count = 1, .copies = &copy, .pairs = &pair, .bytes = 1000};
	struct kvs_text text;
	layout->components[0].tensors[0].address = 0x10000;
	cr_expect(kvs_copy_guard(&plan, KVS_SIDE_DESTINATION, layout, 0, &text));
	copy.block_len = 1001;
	cr_expect(!kvs_copy_guard(&plan, KVS_SIDE_DESTINATION, layout, 0, &text));
	copy.block_len = 1000;
	pair.dst = ITEMS;
	cr_expect(!kvs_copy_guard(&plan, KVS_SIDE_DESTINATION, layout, 0, &text));
	pair.dst = UINT32_MAX;
	copy.dst_item_stride = UINT64_MAX / 2;
	cr_expect(!kvs_copy_guard(&plan, KVS_SIDE_DESTINATION, layout, 0, &text), "the product wraps");
	pair.dst = 1;
	copy.dst_item_stride = UINT64_MAX - 0x10000;
	cr_expect(!kvs_copy_guard(&plan, KVS_SIDE_DESTINATION, layout, 0, &text), "the sum wraps");
	copy.dst_item_stride = 1000;
	copy.dst_base = 0xffff;
	cr_expect(!kvs_copy_guard(&plan, KVS_SIDE_DESTINATION, layout, 0, &text), "before the region");
	copy.dst_base = 0x10000;
	copy.dst_tensor = 9;
	cr_expect(!kvs_copy_guard(&plan, KVS_SIDE_DESTINATION, layout, 0, &text), "no such tensor");
	layout->components[0].tensors[0].address = 0;
	kvs_layout_free(layout);
}

Test(transport_copy, item_sets)
{
	static const int32_t items[] = {5, 3, 9, 3, 1000000}, inside[] = {3, 5, 9, 1000000, 3}, outside[] = {3, 4},
	                     negative[] = {3, -1};
	struct kvs_itemset set;
	int32_t bad;
	cr_assert(kvs_itemset_init(&set, items, 5, &bad));
	cr_expect(kvs_itemset_holds(&set, inside, 5, &bad));
	cr_expect(!kvs_itemset_holds(&set, outside, 2, &bad) && bad == 4);
	cr_expect(!kvs_itemset_holds(&set, negative, 2, &bad) && bad == -1);
	kvs_itemset_free(&set);
	cr_expect(!kvs_itemset_init(&set, negative, 2, &bad) && bad == -1);
	cr_assert(kvs_itemset_init(&set, NULL, 0, &bad));
	cr_expect(!kvs_itemset_holds(&set, inside, 1, &bad) && kvs_itemset_holds(&set, NULL, 0, &bad));
}
