/* SPDX-License-Identifier: Apache-2.0 */
/* Failures that users reported in public, replayed with their numbers as far as the policy decides them. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "policy/plan.h"
#include "support/oracle.h"
#include "support/shapes.h"

#define BF16 2U
#define GIB  (1ULL << 30)

/* Pages of the last window: the servers' own rule, the same on both sides. */
static uint32_t window_pages(uint32_t prompt, uint32_t window, uint32_t page, uint32_t decode_prefix)
{
	uint32_t start = prompt > window ? prompt - window : 0;

	if (start < decode_prefix)
		start = decode_prefix;
	start = start / page * page;
	return (prompt - start + page - 1) / page;
}

/* The split of tensor 0 of a component "kv" with these items; the test fails when it is refused. */
static struct kvs_split split_of(uint32_t p, uint32_t r, uint64_t src_item, uint32_t d_size, uint32_t d,
                                 uint64_t dst_item, uint32_t page)
{
	struct kvs_layout *prefill = shape_kv(p, r, page, 1, src_item, 0, 1);
	struct kvs_layout *decode = shape_kv(d_size, d, page, 1, dst_item, 0, 1);
	struct kvs_verdict verdict;
	struct kvs_split split;

	cr_assert(kvs_policy_split(prefill, decode, 0, 0, 0, &split, &verdict), "%s", verdict.text.s);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
	return split;
}

/* gpt-oss-120b: the refused hybrid state. */
Test(policy_trials, A1_gpt_oss_sliding_window)
{
	static const uint32_t pairs[][2] = {{1, 4}, {4, 1}, {2, 4}, {8, 2}};
	struct oracle_case o = {.heads = 8, .layers = 18, .page_size = 64, .spare = 2, .type = "swa", .seed = 1};
	uint32_t i;

	o.k_width = o.v_width = 64 * BF16;
	o.order = KVS_ORDER_NHD;
	o.pages = window_pages(1000, 128, 64, 0);
	cr_assert_eq(o.pages, 3);
	cr_assert_eq(shape_item(8, 1, 64, o.k_width), 65536);
	cr_assert_eq(shape_item(8, 4, 64, o.k_width), 16384);
	for (i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
		struct oracle_sum sum = {0};

		o.prefill_tp = pairs[i][0];
		o.decode_tp = pairs[i][1];
		oracle_run(&o, &sum);
		cr_assert_eq(sum.bytes, 7077888);
		if (o.decode_tp == 4)
			cr_assert_eq(sum.bytes / 4, 1769472);
		/* A descriptor per tensor, whatever the number of tokens (6,912 of 256 bytes in a decode rank of 1 ->
		 * 4). */
		cr_assert_eq(sum.copies, 36 * sum.plans);
		if (o.prefill_tp == 1)
			cr_assert_eq(sum.runs, 4ULL * 6912);
	}
	for (i = 0; i < 4; i++) {
		struct kvs_split split = split_of(1, 0, 65536, 4, i, 16384, 64);

		cr_assert_eq(split.n, 4);
		cr_assert_eq(split.rep, 1);
		cr_assert_eq(split.index, i);
	}
}

Test(policy_trials, A1_gpt_oss_page_1)
{
	struct oracle_case o = {.prefill_tp = 1, .decode_tp = 4, .heads = 8, .layers = 18, .page_size = 1, .seed = 2};
	struct oracle_sum sum = {0};

	o.k_width = o.v_width = 64 * BF16;
	o.order = KVS_ORDER_NHD;
	o.type = "swa";
	o.spare = 100;
	o.pages = window_pages(1000, 128, 1, 0);
	cr_assert_eq(o.pages, 128);
	oracle_run(&o, &sum);
	cr_assert_eq(sum.bytes, 18ULL * 2 * 128 * 8 * 128);
}

/* MiMo-V2-Flash: V strode by K's length. */
Test(policy_trials, A2_unequal_k_and_v)
{
	struct oracle_case o = {.prefill_tp = 4, .decode_tp = 2, .heads = 8, .page_size = 64, .pages = 4, .spare = 4};
	struct kvs_layout *prefill = shape_kv(4, 1, 64, 9, 49152, 32768, 8);
	struct kvs_layout *decode = shape_kv(2, 0, 64, 9, 98304, 65536, 8);
	static const int32_t items[] = {1, 5};
	struct oracle_sum sum = {0};
	struct kvs_verdict verdict;
	struct kvs_plan *plan;
	uint32_t i;

	cr_assert_eq(shape_item(8, 4, 64, 192 * BF16), 49152);
	cr_assert_eq(shape_item(8, 2, 64, 128 * BF16), 65536);
	cr_assert(kvs_plan_build(prefill, decode, 0, items, 2, items, 2, &plan, &verdict));
	cr_assert_eq(plan->copy_count, 18);
	for (i = 0; i < 18; i++) {
		const struct kvs_copy *copy = &plan->copies[i];

		cr_assert_eq(copy->src_item_stride, i < 9 ? 49152 : 32768);
		cr_assert_eq(copy->dst_item_stride, i < 9 ? 98304 : 65536);
		cr_assert_eq(copy->block_len, i < 9 ? 768 : 512);
		cr_assert_eq(copy->dst_block_stride, i < 9 ? 1536 : 1024);
		cr_assert_eq(copy->dst_base, i < 9 ? 768 : 512);
		cr_assert_eq(copy->block_count, 64);
	}
	kvs_plan_free(plan);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
	o.k_width = 192 * BF16;
	o.v_width = 128 * BF16;
	o.order = KVS_ORDER_NHD;
	o.type = "kv";
	o.layers = 9;
	oracle_run(&o, &sum);
	o.type = "swa";
	o.layers = 39;
	o.pages = 3;
	oracle_run(&o, &sum);
}

/* MiMo: 4 KV heads in the full layers, replicated at P = 8, and 8 in the sliding ones. */
Test(policy_trials, A3a_mimo_head_counts)
{
	struct oracle_case o = {.prefill_tp = 8, .decode_tp = 4, .page_size = 64, .pages = 3, .spare = 1, .seed = 3};
	struct oracle_sum sum = {0};
	uint32_t r;

	for (r = 0; r < 8; r++) {
		struct kvs_split full = split_of(8, r, 24576, 4, r / 2, 24576, 64);
		struct kvs_split swa = split_of(8, r, 24576, 4, r / 2, 49152, 64);

		cr_assert_eq(full.n, 1);
		cr_assert_eq(full.rep, 2);
		cr_assert_eq(full.skip, r % 2 == 1);
		cr_assert_eq(swa.n, 2);
		cr_assert_eq(swa.rep, 1);
		cr_assert_eq(swa.index, r % 2);
		cr_assert_not(swa.skip);
	}
	o.order = KVS_ORDER_NHD;
	o.k_width = 192 * BF16;
	o.v_width = 128 * BF16;
	o.heads = 4;
	o.layers = 9;
	o.type = "kv";
	oracle_run(&o, &sum);
	o.heads = 8;
	o.layers = 39;
	o.type = "swa";
	oracle_run(&o, &sum);
}

/* gemma-4-31B: 16 heads of 256 in the sliding layers, 4 of 512 in the full ones. */
Test(policy_trials, A3b_gemma_head_counts)
{
	struct oracle_case o = {.prefill_tp = 2, .decode_tp = 8, .page_size = 64, .spare = 1, .seed = 4};
	uint64_t swa_row = 8ULL * 256 * BF16;
	uint64_t full_row = 2ULL * 512 * BF16;
	struct oracle_sum sum = {0};
	uint32_t d;

	for (d = 0; d < 8; d++) {
		struct kvs_split swa = split_of(2, d / 4, 64 * swa_row, 8, d, 64 * swa_row / 4, 64);
		struct kvs_split full = split_of(2, d / 4, 64 * full_row, 8, d, 64 * full_row / 2, 64);

		/* Global heads: 8 or 2 for each prefill rank before this one, then the slice. */
		cr_assert_eq(d / 4 * 8 + swa.index * 2, 2 * d);
		cr_assert_eq(d / 4 * 2 + full.index, d / 2);
		/* Nothing is read past a source token row. */
		cr_assert_leq((swa.index + 1) * (swa_row / swa.n), swa_row);
		cr_assert_leq((full.index + 1) * (full_row / full.n), full_row);
	}
	o.order = KVS_ORDER_NHD;
	o.type = "swa";
	o.heads = 16;
	o.k_width = o.v_width = 256 * BF16;
	o.layers = 5; /* of 50 alike */
	o.pages = window_pages(5000, 1024, 64, 0);
	cr_assert_eq(o.pages, 17);
	oracle_run(&o, &sum);
	o.type = "kv";
	o.heads = 4;
	o.k_width = o.v_width = 512 * BF16;
	o.layers = 2; /* of 10 alike */
	o.pages = 10;
	oracle_run(&o, &sum);
}

/* More decode ranks than heads: upstream took the heads by modulo. */
Test(policy_trials, A4_more_ranks_than_heads)
{
	static const uint32_t shapes[][3] = {{8, 4, 16}, {2, 1, 4}, {2, 4, 1}, {8, 8, 16}, {8, 16, 8}};
	struct oracle_case o = {.layers = 4, .page_size = 16, .pages = 3, .spare = 2, .type = "kv", .seed = 5};
	struct oracle_sum sum = {0};
	uint32_t i;
	uint32_t d;

	o.k_width = o.v_width = 64;
	for (i = 0; i < 2 * sizeof(shapes) / sizeof(shapes[0]); i++) {
		o.order = i % 2 ? KVS_ORDER_HND : KVS_ORDER_NHD;
		o.heads = shapes[i / 2][0];
		o.prefill_tp = shapes[i / 2][1];
		o.decode_tp = shapes[i / 2][2];
		oracle_run(&o, &sum);
	}
	for (d = 0; d < 16; d++) {
		struct kvs_split split = split_of(4, d / 4, 2048, 16, d, 1024, 16);
		struct kvs_split whole = split_of(8, d / 2, 1024, 16, d, 1024, 16);
		uint32_t by_modulo = d % 2;

		cr_assert_eq(split.index, d / 2 % 2);
		cr_assert_eq(split.index != by_modulo, d % 4 == 1 || d % 4 == 2);
		cr_assert_eq(whole.n, 1);
		cr_assert_eq(whole.rep, 2);
	}
}

/* A list on the heap, so that a sanitizer sees a read past its end. */
static int32_t *item_list(uint32_t count)
{
	int32_t *list = malloc(count * sizeof(*list) + !count);
	uint32_t i;

	cr_assert_not_null(list);
	for (i = 0; i < count; i++)
		list[i] = (int32_t)i;
	return list;
}

Test(policy_trials, A5_lists_of_different_length)
{
	uint32_t counts[][2] = {{0, 0}, {3, 0}, {0, 3}, {1, 391}, {391, 1}, {0, 0}};
	uint32_t i;

	counts[0][0] = window_pages(129, 128, 64, 0);
	counts[0][1] = window_pages(128, 128, 64, 0);
	cr_assert_eq(counts[0][0], 3);
	cr_assert_eq(counts[0][1], 2);
	counts[5][0] = counts[5][1] = window_pages(1000, 128, 64, 960);
	cr_assert_eq(counts[5][0], 1);
	for (i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		struct kvs_layout *prefill = shape_layout(2, 0, 64, 2);
		struct kvs_layout *decode = shape_layout(1, 0, 64, 2);
		uint32_t fewer = counts[i][0] < counts[i][1] ? counts[i][0] : counts[i][1];
		int32_t *src = item_list(counts[i][0]);
		int32_t *dst = item_list(counts[i][1]);
		struct kvs_verdict verdict;
		struct kvs_plan *plan;

		shape_component(prefill, 0, "swa", KVS_ORDER_NHD, 2, 4096, 4096, 400);
		shape_component(decode, 0, "swa", KVS_ORDER_NHD, 2, 8192, 8192, 400);
		shape_component(prefill, 1, "minimax_dense_kv", KVS_ORDER_NHD, 2, 4096, 4096, 400);
		shape_component(decode, 1, "minimax_dense_kv", KVS_ORDER_NHD, 2, 8192, 8192, 400);
		cr_assert(kvs_plan_build(prefill, decode, 0, src, counts[i][0], dst, counts[i][1], &plan, &verdict));
		cr_assert_eq(plan->pair_count, fewer);
		cr_assert_eq(plan->bytes, 4ULL * fewer * 4096);
		kvs_plan_free(plan);
		if (counts[i][0] == counts[i][1]) {
			cr_assert(kvs_plan_build(prefill, decode, 1, src, fewer, dst, fewer, &plan, &verdict));
			kvs_plan_free(plan);
		} else {
			cr_assert_not(kvs_plan_build(prefill, decode, 1, src, counts[i][0], dst, counts[i][1], &plan,
			                             &verdict));
			cr_assert_null(plan);
			cr_assert_eq(verdict.refusal, KVS_REFUSE_INDICES);
		}
		free(src);
		free(dst);
		kvs_layout_free(prefill);
		kvs_layout_free(decode);
	}
}

/* MiniMax-M3: index keys that every rank holds, at times scaled with the ranks. */
Test(policy_trials, A6_minimax_index_keys)
{
	struct oracle_case o = {.page_size = 128, .pages = 4096 / 128, .spare = 1, .seed = 6, .k_width = 16};
	uint32_t i;

	for (i = 0; i < 2; i++) {
		struct oracle_sum sum = {0};

		o.prefill_tp = i ? 8 : 4;
		o.decode_tp = i ? 4 : 8;
		o.order = KVS_ORDER_NHD;
		o.type = "minimax_index_k";
		o.layers = 57;
		o.v_width = 0;
		o.heads = 1;
		o.whole = true;
		oracle_run(&o, &sum);
		cr_assert_eq(sum.bytes, 57ULL * 4096 * 16 * o.decode_tp);
		o.heads = 8;
		o.layers = 5;
		o.whole = false;
		oracle_run(&o, &sum);
		o.heads = 4;
		o.type = "minimax_dense_kv";
		o.layers = 3;
		o.v_width = 16;
		oracle_run(&o, &sum);
	}
}

/* bf16 against fp8 looks just like a TP ratio. */
Test(policy_trials, A9_dtype_mismatch)
{
	static const struct {
		uint32_t p;
		uint32_t d;
		uint64_t src_item;
		uint64_t dst_item;
		const char *dst_dtype;
	} trials[] = {
	        {2, 2, 32768, 16384, "fp8_e4m3"}, {2, 1, 32768, 32768, "fp8_e4m3"}, {4, 2, 16384, 32768, "bfloat16"}};
	uint32_t i;

	for (i = 0; i < 3; i++) {
		struct kvs_layout *prefill = shape_kv(trials[i].p, 0, 64, 2, trials[i].src_item, trials[i].src_item, 4);
		struct kvs_layout *decode = shape_kv(trials[i].d, 0, 64, 2, trials[i].dst_item, trials[i].dst_item, 4);
		struct kvs_verdict verdict;

		(void)snprintf(decode->dtype, sizeof(decode->dtype), "%s", trials[i].dst_dtype);
		kvs_policy_judge(prefill, decode, 0, true, &verdict);
		if (i < 2) {
			cr_assert_eq(verdict.refusal, KVS_REFUSE_DTYPE);
			cr_assert_not_null(strstr(verdict.text.s, "item lengths 32768 and"));
			cr_assert_not_null(strstr(verdict.text.s, i ? " and 32768" : " and 16384"));
			cr_assert_not_null(strstr(verdict.text.s, "prefill_tp_size=2"));
			cr_assert_not_null(strstr(verdict.text.s, i ? "decode_tp_size=1" : "decode_tp_size=2"));
			cr_assert_not_null(strstr(verdict.text.s, "bfloat16"));
			cr_assert_not_null(strstr(verdict.text.s, "fp8_e4m3"));
		} else {
			cr_assert_eq(verdict.action, KVS_ACT_SLICE);
		}
		/* Nothing is spliced at equal TP, so that pair is left to the connector's own check. */
		kvs_policy_judge(prefill, decode, 0, false, &verdict);
		cr_assert_eq(verdict.action == KVS_ACT_PASS, i == 0);
		kvs_layout_free(prefill);
		kvs_layout_free(decode);
	}
}

Test(policy_trials, A11_page_size_mismatch)
{
	static const uint32_t pages[][2] = {{32, 64}, {1, 64}, {64, 64}};
	uint32_t i;

	for (i = 0; i < 3; i++) {
		struct kvs_layout *prefill =
		        shape_kv(2, 1, pages[i][0], 2, 256ULL * pages[i][0], 256ULL * pages[i][0], 4);
		struct kvs_layout *decode =
		        shape_kv(1, 0, pages[i][1], 2, 512ULL * pages[i][1], 512ULL * pages[i][1], 4);
		static const int32_t item;
		struct kvs_verdict verdict;
		struct kvs_plan *plan;

		cr_assert_eq(kvs_plan_build(prefill, decode, 0, &item, 1, &item, 1, &plan, &verdict), i == 2);
		if (i < 2) {
			cr_assert_eq(verdict.refusal, KVS_REFUSE_PAGE_SIZE);
			cr_assert_not_null(strstr(verdict.text.s, i ? "1 tokens" : "32 tokens"));
			cr_assert_not_null(strstr(verdict.text.s, "64 on the decode"));
		}
		kvs_plan_free(plan);
		kvs_layout_free(prefill);
		kvs_layout_free(decode);
	}
}

/* DP attention: prefill tp 8 / dp 2 (attention TP 4), decode tp 8 / dp 4 (attention TP 2). */
Test(policy_trials, A12_dp_attention_ranks)
{
	struct oracle_case o = {.prefill_tp = 4, .decode_tp = 2, .heads = 8, .layers = 3, .page_size = 32, .rooms = 8};
	struct oracle_sum sum = {0};
	uint32_t engine;
	uint32_t group;

	for (engine = 0; engine < 8; engine++) {
		struct kvs_layout *prefill = shape_kv(4, engine % 4, 32, 1, 4096, 4096, 4);
		uint32_t decode_rank;

		for (decode_rank = 0; decode_rank < 8; decode_rank++) {
			struct kvs_layout *decode = shape_kv(2, decode_rank % 2, 32, 1, 8192, 8192, 4);
			bool paired = engine % 4 / 2 == decode_rank % 2;
			struct kvs_verdict verdict;
			struct kvs_split split;

			cr_assert_eq(kvs_policy_split(prefill, decode, 0, 0, 0, &split, &verdict), paired);
			cr_assert_eq(verdict.refusal, paired ? KVS_REFUSE_NONE : KVS_REFUSE_RANKS);
			if (paired)
				cr_assert_eq(split.index, engine % 2);
			kvs_layout_free(decode);
		}
		kvs_layout_free(prefill);
	}
	/* Engine rank 5 is attention rank 1: the second slot of decode rank 0. */
	cr_assert_eq(split_of(4, 5 % 4, 4096, 2, 0, 8192, 32).index, 1);
	/* Eight rooms at once in either DP group: none touches another's pages. */
	o.k_width = o.v_width = 128;
	o.order = KVS_ORDER_NHD;
	o.type = "kv";
	o.pages = 40;
	o.spare = 8;
	for (group = 0; group < 2; group++) {
		o.seed = 7 + group;
		oracle_run(&o, &sum);
	}
	cr_assert_eq(sum.plans, 2ULL * 4 * 8);
}

/* Offsets past 2 GiB and 4 GiB, and a base address in the upper half. */
Test(policy_trials, A16_large_pools)
{
	static const int32_t src[] = {40000, 70000, 147455};
	static const int32_t dst[] = {147455, 0, 40000};
	struct kvs_layout *prefill = shape_kv(1, 0, 64, 1, 65536, 0, 9 * GIB / 65536);
	struct kvs_layout *decode = shape_kv(2, 1, 64, 1, 32768, 0, 9 * GIB / 32768);
	struct kvs_verdict verdict;
	struct kvs_plan_iter iter;
	struct kvs_plan *plan;
	struct kvs_run run;
	uint32_t i;

	prefill->components[0].tensors[0].address = 0xff00000000001000;
	decode->components[0].tensors[0].address = 0xff00001000000000;
	cr_assert(kvs_plan_build(prefill, decode, 0, src, 3, dst, 3, &plan, &verdict), "%s", verdict.text.s);
	kvs_plan_seek(&iter, plan, 0);
	cr_assert(kvs_plan_next(&iter, UINT64_MAX, &run));
	cr_assert_eq(run.src, 0xff00000000001000 + 2621440000 + 512);
	cr_assert_eq(run.dst, 0xff00001000000000 + 147455ULL * 32768);
	cr_assert_eq(run.len, 512);
	for (i = 0; i < 3; i++) {
		kvs_plan_seek(&iter, plan, 32768ULL * i + 32767);
		cr_assert(kvs_plan_next(&iter, UINT64_MAX, &run));
		cr_assert_eq(run.src, 0xff00000000001000 + 65536ULL * (uint32_t)src[i] + 65535);
		cr_assert_eq(run.dst, 0xff00001000000000 + 32768ULL * (uint32_t)dst[i] + 32767);
		cr_assert_eq(run.len, 1);
	}
	kvs_plan_free(plan);
	/* The last item is the 147,456th: one more is past the end, and no product of the check wraps. */
	for (i = 0; i < 2; i++) {
		static const int32_t past[] = {147456, INT32_MAX};

		cr_assert_not(kvs_plan_build(prefill, decode, 0, &past[i], 1, dst, 1, &plan, &verdict));
		cr_assert_eq(verdict.refusal, KVS_REFUSE_INDICES);
	}
	prefill->components[0].tensors[0].address = UINT64_MAX - 9 * GIB + 1;
	cr_assert_not(kvs_plan_build(prefill, decode, 0, src, 3, dst, 3, &plan, &verdict));
	cr_assert_eq(verdict.refusal, KVS_REFUSE_LAYOUT);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

static uint8_t *reserve(uint64_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	cr_assert_neq(p, MAP_FAILED);
	return p;
}

/* The same with real memory: 9 GiB reserved on each side, only the listed pages touched. */
Test(policy_trials, A16_large_pools_in_memory)
{
	static const int32_t src[] = {40000, 147455};
	static const int32_t dst[] = {294911, 80000};
	struct kvs_layout *prefill = shape_kv(1, 0, 64, 1, 65536, 0, 9 * GIB / 65536);
	struct kvs_layout *decode = shape_kv(2, 1, 64, 1, 32768, 0, 9 * GIB / 32768);
	uint8_t *from = reserve(9 * GIB);
	uint8_t *to = reserve(9 * GIB);
	struct kvs_verdict verdict;
	struct kvs_plan_iter iter;
	struct kvs_plan *plan;
	struct kvs_run run;
	uint32_t i;

	prefill->components[0].tensors[0].address = (uintptr_t)from;
	decode->components[0].tensors[0].address = (uintptr_t)to;
	for (i = 0; i < 65536; i++) {
		from[40000ULL * 65536 + i] = (uint8_t)(i * 7 + i / 512);
		from[147455ULL * 65536 + i] = (uint8_t)(i * 11 + i / 512 + 1);
	}
	cr_assert(kvs_plan_build(prefill, decode, 0, src, 2, dst, 2, &plan, &verdict), "%s", verdict.text.s);
	kvs_plan_seek(&iter, plan, 0);
	while (kvs_plan_next(&iter, UINT64_MAX, &run))
		memcpy((void *)(uintptr_t)run.dst, (const void *)(uintptr_t)run.src, run.len);
	for (i = 0; i < 32768; i++) {
		uint32_t at = i / 512 * 1024 + 512 + i % 512;

		cr_assert_eq(to[294911ULL * 32768 + i], (uint8_t)(at * 7 + at / 512));
		cr_assert_eq(to[80000ULL * 32768 + i], (uint8_t)(at * 11 + at / 512 + 1));
	}
	kvs_plan_free(plan);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
	(void)munmap(from, 9 * GIB);
	(void)munmap(to, 9 * GIB);
}

/* Mamba is the connector's own business; the sliding window beside it is ours. */
Test(policy_trials, A17_mamba_beside_sliding_window)
{
	struct kvs_layout *prefill = shape_layout(4, 1, 64, 3);
	struct kvs_layout *decode = shape_layout(2, 0, 64, 3);
	struct kvs_verdict verdict;

	shape_component(prefill, 0, "kv", KVS_ORDER_NHD, 2, 8192, 8192, 4);
	shape_component(decode, 0, "kv", KVS_ORDER_NHD, 2, 16384, 16384, 4);
	shape_component(prefill, 1, "mamba", KVS_ORDER_UNKNOWN, 2, 1000, 3000, 4);
	shape_component(decode, 1, "mamba", KVS_ORDER_UNKNOWN, 2, 2000, 6000, 4);
	shape_component(prefill, 2, "swa", KVS_ORDER_NHD, 2, 8192, 8192, 4);
	shape_component(decode, 2, "swa", KVS_ORDER_NHD, 2, 16384, 16384, 4);
	kvs_policy_judge(prefill, decode, 1, false, &verdict);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_TYPE);
	kvs_policy_judge(prefill, decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_SLICE);
	kvs_policy_judge(prefill, decode, 2, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_SLICE);
	kvs_layout_free(prefill);
	kvs_layout_free(decode);
}

/* Plain multi-head attention, 32 heads of 128: the smoke test. */
Test(policy_trials, B3_multi_head_attention)
{
	struct oracle_case o = {.prefill_tp = 2, .decode_tp = 1, .heads = 32, .layers = 4, .page_size = 32, .pages = 8};
	struct oracle_sum sum = {0};

	o.k_width = o.v_width = 128 * BF16;
	o.order = KVS_ORDER_NHD;
	o.type = "kv";
	o.spare = 1;
	oracle_run(&o, &sum);
	cr_assert_eq(sum.bytes, 4ULL * 2 * 8 * 32 * 32 * 256);
}
