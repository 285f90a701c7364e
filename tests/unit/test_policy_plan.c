/* SPDX-License-Identifier: Apache-2.0 */
/* Copy plans: shape, size, merging, walking from any byte, pairing of tensors. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "policy/plan.h"
#include "support/random.h"
#include "support/shapes.h"

static struct kvs_plan *build(const struct kvs_layout *prefill, const struct kvs_layout *decode, const int32_t *src,
                              const int32_t *dst, uint32_t count)
{
	struct kvs_verdict verdict;
	struct kvs_plan *plan;

	cr_assert(kvs_plan_build(prefill, decode, 0, src, count, dst, count, &plan, &verdict), "%s", verdict.text.s);
	return plan;
}

/* The stream byte by byte, straight from the definition in the header. */
struct byte_move {
	uint64_t src;
	uint64_t dst;
};

static struct byte_move *expand(const struct kvs_plan *plan)
{
	struct byte_move *moves = malloc((plan->bytes + 1) * sizeof(*moves));
	uint64_t at = 0;
	uint32_t c;
	uint32_t p;

	cr_assert_not_null(moves);
	for (c = 0; c < plan->copy_count; c++) {
		const struct kvs_copy *copy = &plan->copies[c];

		cr_assert_eq(copy->stream_start, at);
		for (p = 0; p < plan->pair_count; p++) {
			uint64_t k;

			for (k = 0; k < copy->block_count * copy->block_len; k++) {
				uint64_t block = k / copy->block_len;
				uint64_t byte = k % copy->block_len;

				moves[at].src = copy->src_base + plan->pairs[p].src * copy->src_item_stride +
				                block * copy->src_block_stride + byte;
				moves[at].dst = copy->dst_base + plan->pairs[p].dst * copy->dst_item_stride +
				                block * copy->dst_block_stride + byte;
				at++;
			}
		}
	}
	cr_assert_eq(at, plan->bytes);
	return moves;
}

/* Walk from every byte, with limits that end runs anywhere: always the same bytes, and the runs are maximal. */
static void walk_everywhere(const struct kvs_plan *plan)
{
	static const uint64_t limits[] = {1, 2, 3, 7, 64, UINT64_MAX};
	struct byte_move *moves = expand(plan);
	struct kvs_plan_iter iter;
	struct kvs_run run;
	uint64_t start;
	uint64_t i;
	size_t l;

	for (start = 0; start <= plan->bytes; start++) {
		for (l = 0; l < sizeof(limits) / sizeof(limits[0]); l++) {
			uint64_t at = start;

			kvs_plan_seek(&iter, plan, start);
			while (kvs_plan_next(&iter, limits[l], &run)) {
				cr_assert(run.len > 0 && run.len <= limits[l] && run.len <= plan->bytes - at);
				for (i = 0; i < run.len; i++) {
					if (moves[at + i].src != run.src + i || moves[at + i].dst != run.dst + i)
						cr_assert_fail("byte %llu from %llu", (unsigned long long)(at + i),
						               (unsigned long long)start);
				}
				at += run.len;
				if (limits[l] != UINT64_MAX || at == plan->bytes)
					continue;
				/* Within a tensor the next byte does not follow on both sides, else it was in the run.
				 */
				if (moves[at].src == run.src + run.len && moves[at].dst == run.dst + run.len)
					cr_assert_fail("two runs could be one at byte %llu", (unsigned long long)at);
			}
			cr_assert_eq(at, plan->bytes);
			cr_assert_not(kvs_plan_next(&iter, limits[l], &run));
		}
	}
	kvs_plan_seek(&iter, plan, plan->bytes + 1);
	cr_assert_not(kvs_plan_next(&iter, 1, &run));
	kvs_plan_seek(&iter, plan, UINT64_MAX);
	cr_assert_not(kvs_plan_next(&iter, 1, &run));
	kvs_plan_seek(&iter, plan, 0);
	cr_assert_not(kvs_plan_next(&iter, 0, &run));
	free(moves);
}

static void place(struct kvs_layout *layout, uint64_t base)
{
	struct kvs_component *c = &layout->components[0];
	uint32_t i;

	for (i = 0; i < c->tensor_count; i++)
		c->tensors[i].address = base + 0x100000ULL * i;
}

Test(policy_plan, walk_from_every_byte)
{
	static const uint32_t tp[][2] = {{4, 2}, {2, 4}, {1, 4}, {2, 2}, {8, 2}};
	static const int32_t src[] = {0, 1, 2, 5, 4, 6};
	static const int32_t dst[] = {3, 4, 5, 6, 0, 2};
	uint32_t i;

	for (i = 0; i < 20; i++) {
		uint32_t p = tp[i / 4][0];
		uint32_t d = tp[i / 4][1];
		uint32_t heads = i % 2 ? 4 : 2;
		enum kvs_page_order order = i / 2 % 2 ? KVS_ORDER_HND : KVS_ORDER_NHD;
		struct kvs_layout *prefill = shape_layout(p, p > d ? p / d : 0, 3, 1);
		struct kvs_layout *decode = shape_layout(d, p > d ? 1 : 0, 3, 1);
		struct kvs_plan *plan;

		if (p == d)
			decode->tp_rank = 0;
		shape_component(prefill, 0, "kv", order, 2, shape_item(heads, p, 3, 3), shape_item(heads, p, 3, 2), 7);
		shape_component(decode, 0, "kv", order, 2, shape_item(heads, d, 3, 3), shape_item(heads, d, 3, 2), 7);
		place(prefill, 0x10000000);
		place(decode, 0x20000000);
		plan = build(prefill, decode, src, dst, 6);
		cr_assert_eq(plan->copy_count, 4);
		walk_everywhere(plan);
		kvs_plan_free(plan);
		kvs_layout_free(prefill);
		kvs_layout_free(decode);
	}
}

/* Packing by source and unpacking by destination, in pieces of different sizes, is the same transfer. */
Test(policy_plan, packed_stream)
{
	struct kvs_layout *prefill = shape_kv(4, 3, 5, 2, 40, 20, 9);
	struct kvs_layout *decode = shape_kv(2, 1, 5, 2, 80, 40, 9);
	static const int32_t src[] = {8, 0, 1, 2};
	static const int32_t dst[] = {0, 4, 5, 6};
	uint8_t from[4][360];
	uint8_t to[4][720] = {{0}};
	uint8_t direct[4][720] = {{0}};
	struct kvs_plan_iter iter;
	struct kvs_plan *plan;
	struct kvs_run run;
	uint8_t *stream;
	uint64_t at;
	uint32_t i;

	for (i = 0; i < 4; i++) {
		memset(from[i], 0, sizeof(from[i]));
		for (at = 0; at < sizeof(from[i]); at++)
			from[i][at] = (uint8_t)test_mix(at + 1000ULL * i);
		prefill->components[0].tensors[i].address = (uintptr_t)from[i];
		decode->components[0].tensors[i].address = (uintptr_t)direct[i];
	}
	plan = build(prefill, decode, src, dst, 4);
	stream = malloc(plan->bytes);
	cr_assert_not_null(stream);
	kvs_plan_seek(&iter, plan, 0);
	for (at = 0; kvs_plan_next(&iter, 33, &run); at += run.len) {
		memcpy(stream + at, (const void *)(uintptr_t)run.src, run.len);
		memcpy((void *)(uintptr_t)run.dst, (const void *)(uintptr_t)run.src, run.len);
	}
	cr_assert_eq(at, plan->bytes);
	/* Last piece first: pieces are independent. */
	for (at = plan->bytes / 50 * 50;; at -= 50) {
		uint64_t end = at + 50 < plan->bytes ? at + 50 : plan->bytes;
		uint64_t pos = at;

		kvs_plan_seek(&iter, plan, at);
		while (pos < end && kvs_plan_next(&iter, end - pos, &run)) {
			uint64_t offset = run.dst - (uintptr_t)direct[run.dst_tensor];

			memcpy(to[run.dst_tensor] + offset, stream + pos, run.len);
			pos += run.len;
		}
		if (!at)
			break;
	}
	cr_assert_eq(memcmp(to, direct, sizeof(to)), 0);
	free(stream);
	kvs_plan_free(plan);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

/* 48 times the tokens: the descriptors stay as many, the pairs grow with the pages alone. */
Test(policy_plan, size_is_layers_plus_pages)
{
	static const uint32_t page_counts[] = {1, 128, 512};
	uint32_t i;

	for (i = 0; i < 3; i++) {
		uint32_t pages = page_counts[i];
		struct kvs_layout *prefill = shape_kv(4, 0, 64, 36, 16384, 16384, pages);
		struct kvs_layout *decode = shape_kv(2, 0, 64, 36, 32768, 32768, pages);
		int32_t *items = malloc(pages * sizeof(*items));
		struct kvs_plan *plan;
		uint32_t j;

		cr_assert_not_null(items);
		for (j = 0; j < pages; j++)
			items[j] = (int32_t)j;
		plan = build(prefill, decode, items, items, pages);
		cr_assert_eq(plan->copy_count, 72);
		cr_assert_eq(plan->pair_count, pages);
		cr_assert_eq(plan->bytes, 72ULL * pages * 16384);
		cr_assert_eq(plan->runs, 72ULL * pages * 64);
		kvs_plan_free(plan);
		free(items);
		kvs_layout_free(prefill);
		kvs_layout_free(decode);
	}
}

Test(policy_plan, neighbours_merge)
{
	/* Contiguous on both sides: 3..5, 8..9; not: 1 -> 2 (source alone), 20 -> 21 (destination alone). */
	static const int32_t src[] = {3, 4, 5, 8, 9, 1, 2, 20, 22};
	static const int32_t dst[] = {0, 1, 2, 3, 4, 10, 12, 20, 21};
	struct kvs_layout *prefill = shape_kv(2, 0, 4, 1, 64, 32, 30);
	struct kvs_layout *decode = shape_kv(4, 1, 4, 1, 64, 32, 30);
	struct kvs_plan_iter iter;
	struct kvs_plan *plan;
	struct kvs_run run;

	plan = build(prefill, decode, src, dst, 9);
	cr_assert_eq(plan->copies[0].block_count, 1);
	cr_assert_eq(plan->copies[0].block_len, 64);
	cr_assert_eq(plan->runs, 12);
	kvs_plan_seek(&iter, plan, 0);
	cr_assert(kvs_plan_next(&iter, UINT64_MAX, &run));
	cr_assert_eq(run.src, 192);
	cr_assert_eq(run.dst, 0);
	cr_assert_eq(run.len, 192);
	cr_assert(kvs_plan_next(&iter, 100, &run));
	cr_assert_eq(run.len, 100);
	cr_assert(kvs_plan_next(&iter, 100, &run));
	cr_assert_eq(run.len, 28);
	kvs_plan_free(plan);
	/* A descending list is no run: 5, 4, 3 and 0x7fffffff next to nothing. */
	plan = build(prefill, decode, (const int32_t[]){5, 4, 3}, (const int32_t[]){5, 4, 3}, 3);
	cr_assert_eq(plan->runs, 6);
	kvs_plan_free(plan);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

/* Rows as the definition has them: NHD a block per token, HND a block per item. */
Test(policy_plan, descriptors)
{
	static const int32_t item = 2;
	struct kvs_layout *prefill = shape_kv(1, 0, 16, 1, 4096, 0, 4);
	struct kvs_layout *decode = shape_kv(4, 3, 16, 1, 1024, 0, 4);
	struct kvs_plan *plan = build(prefill, decode, &item, &item, 1);
	const struct kvs_copy *copy = &plan->copies[0];

	cr_assert_eq(copy->src_base, 192);
	cr_assert_eq(copy->dst_base, 0);
	cr_assert_eq(copy->block_len, 64);
	cr_assert_eq(copy->block_count, 16);
	cr_assert_eq(copy->src_block_stride, 256);
	cr_assert_eq(copy->dst_block_stride, 64);
	kvs_plan_free(plan);
	prefill->components[0].order = decode->components[0].order = KVS_ORDER_HND;
	plan = build(prefill, decode, &item, &item, 1);
	copy = &plan->copies[0];
	cr_assert_eq(copy->src_base, 3072);
	cr_assert_eq(copy->block_len, 1024);
	cr_assert_eq(copy->block_count, 1);
	cr_assert_eq(copy->src_item_stride, 4096);
	kvs_plan_free(plan);
	/* The other way the slot is in the destination. */
	plan = build(decode, prefill, &item, &item, 1);
	copy = &plan->copies[0];
	cr_assert_eq(copy->src_base, 0);
	cr_assert_eq(copy->dst_base, 3072);
	cr_assert_eq(copy->src_item_stride, 1024);
	cr_assert_eq(copy->dst_item_stride, 4096);
	kvs_plan_free(plan);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

Test(policy_plan, nothing_to_move)
{
	static const int32_t item = 2;
	struct kvs_layout *prefill = shape_kv(4, 1, 16, 2, 1600, 800, 4);
	struct kvs_layout *decode = shape_kv(2, 0, 16, 2, 1600, 800, 4);
	struct kvs_plan_iter iter;
	struct kvs_verdict verdict;
	struct kvs_plan *plan;
	struct kvs_run run;

	/* Another rank's turn. */
	cr_assert(kvs_plan_build(prefill, decode, 0, &item, 1, &item, 1, &plan, &verdict));
	cr_assert_eq(verdict.action, KVS_ACT_SKIP);
	cr_assert_eq(plan->copy_count, 0);
	cr_assert_eq(plan->bytes, 0);
	cr_assert_eq(plan->runs, 0);
	kvs_plan_seek(&iter, plan, 0);
	cr_assert_not(kvs_plan_next(&iter, 1, &run));
	kvs_plan_free(plan);
	/* No items. */
	prefill->tp_rank = 0;
	plan = build(prefill, decode, NULL, NULL, 0);
	cr_assert_eq(plan->pair_count, 0);
	cr_assert_eq(plan->runs, 0);
	kvs_plan_seek(&iter, plan, 0);
	cr_assert_not(kvs_plan_next(&iter, 1, &run));
	kvs_plan_free(plan);
	/* A tensor that neither holds is left out; the others move. */
	prefill->components[0].tensors[1].item_len = 0;
	decode->components[0].tensors[1].item_len = 0;
	plan = build(prefill, decode, &item, &item, 1);
	cr_assert_eq(plan->copy_count, 3);
	cr_assert_eq(plan->copies[1].dst_tensor, 2);
	cr_assert_eq(plan->bytes, 1600 + 2 * 800);
	kvs_plan_free(plan);
	/* A component without tensors. */
	prefill->components[0].tensor_count = 0;
	decode->components[0].tensor_count = 0;
	kvs_policy_judge(prefill, decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_SKIP);
	kvs_plan_free(NULL);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

/* Lengths only a malicious peer would name: the sum of bytes does not wrap into a small plan. */
Test(policy_plan, bytes_do_not_wrap)
{
	struct kvs_layout *prefill = shape_kv(1, 0, 1, 2, 1ULL << 62, 0, 1);
	struct kvs_layout *decode = shape_kv(2, 0, 1, 2, 1ULL << 61, 0, 1);
	static const int32_t items[8];
	struct kvs_verdict verdict;
	struct kvs_plan *plan;

	plan = build(prefill, decode, items, items, 3);
	cr_assert_eq(plan->bytes, 6ULL << 61);
	kvs_plan_free(plan);
	cr_assert_not(kvs_plan_build(prefill, decode, 0, items, 4, items, 4, &plan, &verdict));
	cr_assert_eq(verdict.refusal, KVS_REFUSE_INDICES);
	cr_assert_not(kvs_plan_build(prefill, decode, 0, items, 8, items, 8, &plan, &verdict));
	cr_assert_eq(verdict.refusal, KVS_REFUSE_INDICES);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

/* At equal TP whole items go over, K and V each with its own length. */
Test(policy_plan, equal_tp)
{
	static const int32_t items[] = {0, 1, 3};
	struct kvs_layout *prefill = shape_kv(2, 1, 16, 2, 1600, 800, 4);
	struct kvs_layout *decode = shape_kv(2, 1, 16, 2, 1600, 800, 4);
	struct kvs_plan *plan = build(prefill, decode, items, items, 3);

	cr_assert_eq(plan->copy_count, 4);
	cr_assert_eq(plan->runs, 8);
	cr_assert_eq(plan->bytes, 3ULL * 2 * (1600 + 800));
	kvs_plan_free(plan);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

static void expect_pairs(const struct kvs_layout *prefill, const struct kvs_layout *decode, const uint32_t *expected)
{
	uint32_t pairs[KVS_MAX_TENSORS];
	struct kvs_verdict verdict;
	uint32_t i;

	cr_assert(kvs_policy_pair(prefill, decode, 0, pairs, &verdict), "%s", verdict.text.s);
	for (i = 0; i < decode->components[0].tensor_count; i++)
		cr_assert_eq(pairs[i], expected[i], "decode tensor %u: %u", i, pairs[i]);
}

/* A prefill of two stages: each serves its layers, K with K and V with V. */
Test(policy_plan, pipeline_by_layer)
{
	static const uint32_t first[] = {0, 1, UINT32_MAX, UINT32_MAX, 2, 3, UINT32_MAX, UINT32_MAX};
	static const uint32_t second[] = {UINT32_MAX, UINT32_MAX, 0, 1, UINT32_MAX, UINT32_MAX, 2, 3};
	static const int32_t item = 1;
	struct kvs_layout *prefill = shape_kv(4, 1, 16, 2, 1600, 800, 4);
	struct kvs_layout *decode = shape_kv(2, 0, 16, 4, 3200, 1600, 4);
	struct kvs_verdict verdict;
	struct kvs_plan *plan;

	shape_layer_ids(decode, 0, 4, 10);
	prefill->pp_size = 2;
	shape_layer_ids(prefill, 0, 2, 10);
	expect_pairs(prefill, decode, first);
	prefill->pp_rank = 1;
	shape_layer_ids(prefill, 0, 2, 12);
	expect_pairs(prefill, decode, second);
	plan = build(prefill, decode, &item, &item, 1);
	cr_assert_eq(plan->copy_count, 4);
	cr_assert_eq(plan->copies[0].src_tensor, 0);
	cr_assert_eq(plan->copies[0].dst_tensor, 2);
	cr_assert_eq(plan->copies[3].src_tensor, 3);
	cr_assert_eq(plan->copies[3].dst_tensor, 7);
	cr_assert_eq(plan->copies[3].block_len, 50);
	kvs_plan_free(plan);
	/* A stage with none of the layers moves nothing; one with a layer that nobody wants is refused. */
	shape_layer_ids(prefill, 0, 2, 30);
	kvs_policy_judge(prefill, decode, 0, false, &verdict);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_TENSORS);
	prefill->components[0].tensor_count = 0;
	kvs_policy_judge(prefill, decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_SKIP);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

/* Stages on both sides: the same stage by position where ids are missing, by id where they are there. */
Test(policy_plan, pipelines_on_both_sides)
{
	static const uint32_t position[] = {0, 1, 2, 3};
	static const uint32_t swapped[] = {1, 0, 3, 2};
	struct kvs_layout *prefill = shape_kv(4, 1, 16, 2, 1600, 800, 4);
	struct kvs_layout *decode = shape_kv(2, 0, 16, 2, 3200, 1600, 4);
	struct kvs_verdict verdict;

	prefill->pp_size = decode->pp_size = 2;
	prefill->pp_rank = decode->pp_rank = 1;
	expect_pairs(prefill, decode, position);
	shape_layer_ids(prefill, 0, 2, 2);
	expect_pairs(prefill, decode, position);
	shape_layer_ids(decode, 0, 2, 2);
	decode->components[0].tensors[0].layer_id = 3;
	decode->components[0].tensors[1].layer_id = 2;
	decode->components[0].tensors[2].layer_id = 3;
	decode->components[0].tensors[3].layer_id = 2;
	expect_pairs(prefill, decode, swapped);
	/* The same stage must hold the same layers; another one may hold none of them. */
	shape_layer_ids(decode, 0, 2, 3);
	kvs_policy_judge(prefill, decode, 0, false, &verdict);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_TENSORS);
	shape_layer_ids(decode, 0, 2, 2);
	prefill->components[0].tensor_count = 0;
	kvs_policy_judge(prefill, decode, 0, false, &verdict);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_TENSORS);
	prefill->components[0].tensor_count = 4;
	shape_layer_ids(decode, 0, 2, 0);
	decode->pp_rank = 0;
	kvs_policy_judge(prefill, decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_SKIP);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

/* Ids on both sides, no pipeline, equal counts: position, as the connectors do. Draft tensors share a layer's id. */
Test(policy_plan, occurrence_order)
{
	static const uint32_t position[] = {0, 1, 2, 3};
	static const uint32_t occurrence[] = {0, 2, 3, 1};
	struct kvs_layout *prefill = shape_kv(4, 1, 16, 2, 1600, 1600, 4);
	struct kvs_layout *decode = shape_kv(2, 0, 16, 2, 3200, 3200, 4);
	static const int32_t src_ids[] = {0, 7, 0, 0};
	static const int32_t dst_ids[] = {0, 0, 0, 7};
	uint32_t i;

	for (i = 0; i < 4; i++) {
		prefill->components[0].tensors[i].layer_id = src_ids[i];
		decode->components[0].tensors[i].layer_id = dst_ids[i];
	}
	expect_pairs(prefill, decode, position);
	prefill->pp_size = 2;
	expect_pairs(prefill, decode, occurrence);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}
