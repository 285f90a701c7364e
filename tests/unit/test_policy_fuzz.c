/* SPDX-License-Identifier: Apache-2.0 */
/* Random layouts and lists: whatever comes in, no crash, a text for each refusal, and no plan out of bounds. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/plan.h"
#include "support/random.h"
#include "support/shapes.h"

#define ROUNDS    400000
#define MAX_ITEMS 6

static uint64_t state = 20240607;

static uint32_t draw(uint32_t low, uint32_t high)
{
	return test_random_in(&state, low, high);
}

static bool chance(uint32_t one_in)
{
	return draw(1, one_in) == 1;
}

/* Mostly small numbers that go together, at times any 64 bits, at times the edges. */
static uint64_t wild(uint64_t sane)
{
	static const uint64_t edges[] = {0,          1,         INT32_MAX,      UINT32_MAX,
	                                 1ULL << 32, INT64_MAX, UINT64_MAX - 1, UINT64_MAX};

	if (!chance(200))
		return sane;
	if (chance(2))
		return edges[draw(0, 7)];
	sane = test_random(&state);
	return sane >> draw(0, 63);
}

static void draw_component(struct kvs_layout *layout, uint32_t component, uint32_t kind, uint64_t heads)
{
	static const char *const types[] = {"kv", "swa", "block_scale", "minimax_index_k", "swa_ring", "mamba", "odd"};
	uint64_t item = heads * layout->page_size * 8;
	enum kvs_page_order order = KVS_ORDER_NHD;
	uint32_t layers = 2;
	uint32_t i;

	/* One draw to a statement: the order within an expression is the compiler's. */
	if (chance(40))
		kind = draw(0, 6);
	if (chance(40))
		order = (enum kvs_page_order)draw(0, 3);
	if (chance(40))
		layers = draw(0, 3);
	shape_component(layout, component, types[kind % 7], order, layers, item, item / 2, 1);
	for (i = 0; i < layout->components[component].tensor_count; i++) {
		struct kvs_tensor *t = &layout->components[component].tensors[i];

		t->item_len = wild(t->item_len);
		t->length = wild(t->item_len * draw(3, MAX_ITEMS));
		t->address = wild(test_random(&state) >> 8);
		if (chance(3))
			t->layer_id = (int32_t)wild(draw(0, 1));
	}
}

static struct kvs_layout *draw_layout(uint32_t tp_size, uint32_t tp_rank, uint32_t page_size, uint32_t kind)
{
	struct kvs_layout *l = shape_layout(tp_size, tp_rank, page_size, draw(1, 2));
	uint32_t i;

	for (i = 0; i < l->component_count; i++)
		draw_component(l, i, kind + i, shape_heads(16, tp_size));
	l->tp_size = (uint32_t)wild(tp_size);
	l->tp_rank = (uint32_t)wild(tp_rank);
	l->page_size = (uint32_t)wild(page_size);
	l->pp_size = chance(20) ? draw(0, 3) : 1;
	l->pp_rank = chance(20) ? draw(0, 3) : 0;
	if (chance(40)) {
		i = draw(0, KVS_NAME_SIZE - 1);
		l->dtype[i] = (char)draw(0, 255);
	}
	if (chance(40))
		l->head_rule = (enum kvs_head_rule)draw(0, 2);
	if (chance(100))
		memset(l->components[0].type, (int)draw(1, 255), KVS_NAME_SIZE);
	return l;
}

static bool inside(const struct kvs_tensor *t, uint64_t address, uint64_t len)
{
	return address >= t->address && len <= t->length && address - t->address <= t->length - len;
}

/* Every block of every pair, straight from the definition; runs from anywhere. */
static void plan_check(const struct kvs_layout *prefill, const struct kvs_layout *decode, uint32_t component,
                       const struct kvs_plan *plan)
{
	const struct kvs_component *src = &prefill->components[component];
	const struct kvs_component *dst = &decode->components[component];
	struct kvs_plan_iter iter;
	struct kvs_run run;
	uint32_t steps;
	uint32_t c;
	uint32_t p;

	for (c = 0; c < plan->copy_count; c++) {
		const struct kvs_copy *copy = &plan->copies[c];

		cr_assert_lt(copy->src_tensor, src->tensor_count);
		cr_assert_lt(copy->dst_tensor, dst->tensor_count);
		cr_assert(copy->block_len > 0 && copy->block_count > 0);
		for (p = 0; p < plan->pair_count; p++) {
			uint64_t from = copy->src_base + plan->pairs[p].src * copy->src_item_stride;
			uint64_t to = copy->dst_base + plan->pairs[p].dst * copy->dst_item_stride;
			uint64_t src_len = (copy->block_count - 1) * copy->src_block_stride + copy->block_len;
			uint64_t dst_len = (copy->block_count - 1) * copy->dst_block_stride + copy->block_len;

			if (!inside(&src->tensors[copy->src_tensor], from, src_len) ||
			    !inside(&dst->tensors[copy->dst_tensor], to, dst_len))
				cr_assert_fail("copy %u pair %u leaves its tensor", c, p);
		}
	}
	kvs_plan_seek(&iter, plan, plan->bytes ? test_random(&state) % plan->bytes : 0);
	for (steps = 0; steps < 200; steps++) {
		uint64_t limit = test_random(&state);

		limit = (limit >> draw(1, 63)) + 1;
		if (!kvs_plan_next(&iter, limit, &run))
			break;
		if (!inside(&src->tensors[run.src_tensor], run.src, run.len) ||
		    !inside(&dst->tensors[run.dst_tensor], run.dst, run.len))
			cr_assert_fail("a run leaves its tensor");
	}
}

static void refusal_check(const struct kvs_verdict *verdict)
{
	size_t i;

	cr_assert_eq(verdict->action, KVS_ACT_REFUSE);
	cr_assert(verdict->refusal > KVS_REFUSE_NONE && verdict->refusal < KVS_REFUSAL_COUNT);
	cr_assert_not_null(memchr(verdict->text.s, '\0', KVS_TEXT_SIZE));
	cr_assert_not_null(strstr(verdict->text.s, kvs_refusal_remedy(verdict->refusal)));
	for (i = 0; verdict->text.s[i]; i++)
		if (verdict->text.s[i] < ' ' || verdict->text.s[i] > '~')
			cr_assert_fail("unprintable character %d in a text", verdict->text.s[i]);
}

static void draw_items(int32_t *items)
{
	uint32_t i;

	for (i = 0; i < MAX_ITEMS; i++)
		items[i] = chance(200) ? (int32_t)test_random(&state) : (int32_t)draw(0, chance(30) ? MAX_ITEMS : 2);
}

/* One round; returns whether it gave a plan. */
static bool round_of(uint32_t component, const struct kvs_layout *prefill, const struct kvs_layout *decode,
                     uint64_t *refused)
{
	uint32_t src_count = draw(0, MAX_ITEMS);
	uint32_t dst_count = chance(10) ? draw(0, MAX_ITEMS) : src_count;
	struct kvs_verdict planned;
	struct kvs_verdict judged;
	int32_t src[MAX_ITEMS];
	int32_t dst[MAX_ITEMS];
	struct kvs_plan *plan;

	draw_items(src);
	draw_items(dst);
	kvs_policy_judge(prefill, decode, component, true, &judged);
	if (judged.action == KVS_ACT_REFUSE)
		refusal_check(&judged);
	if (!kvs_plan_build(prefill, decode, component, src, src_count, dst, dst_count, &plan, &planned)) {
		cr_assert_null(plan);
		refusal_check(&planned);
		cr_assert(judged.action == KVS_ACT_REFUSE || planned.refusal == KVS_REFUSE_INDICES);
		refused[planned.refusal]++;
		return false;
	}
	cr_assert_eq(planned.action, judged.action);
	cr_assert_eq(planned.action == KVS_ACT_SKIP, plan->copy_count == 0);
	plan_check(prefill, decode, component, plan);
	kvs_plan_free(plan);
	return true;
}

Test(policy_fuzz, random_layouts, .timeout = 240)
{
	static const uint32_t sizes[] = {1, 2, 4, 8, 16, 32, 3};
	uint64_t refused[KVS_REFUSAL_COUNT] = {0};
	uint32_t plans = 0;
	uint32_t i;
	int r;

	for (i = 0; i < ROUNDS; i++) {
		uint32_t p = sizes[draw(0, 6)];
		uint32_t d = sizes[draw(0, 6)];
		uint32_t page = draw(1, 20);
		uint32_t decode_rank = draw(0, d - 1);
		/* A rank that serves this decode rank, where the sizes go together. */
		uint32_t prefill_rank = p > d ? decode_rank * (p / d) + draw(0, p / d - 1) : decode_rank / (d / p);
		uint32_t kind = draw(0, 6);
		struct kvs_layout *prefill = draw_layout(p, prefill_rank, page, kind);
		struct kvs_layout *decode = draw_layout(d, decode_rank, page, kind);

		plans += round_of(chance(50) ? draw(0, 40) : chance(4), prefill, decode, refused);
		kvs_layout_free(prefill);
		kvs_layout_free(decode);
	}
	printf("policy fuzz: %u random pairs of layouts, %u plans, refused:", i, plans);
	for (r = 1; r < KVS_REFUSAL_COUNT; r++)
		printf(" %s %llu", kvs_refusal_name(r), (unsigned long long)refused[r]);
	printf("\n");
	(void)fflush(stdout);
	cr_assert_gt(plans, ROUNDS / 20);
	/* The draw reaches every refusal. */
	for (r = 1; r < KVS_REFUSAL_COUNT; r++)
		cr_assert_gt(refused[r], 0, "%s", kvs_refusal_name(r));
}
