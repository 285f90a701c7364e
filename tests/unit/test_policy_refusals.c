/* SPDX-License-Identifier: Apache-2.0 */
/* Every way to be refused, and what the text says. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "policy/plan.h"
#include "support/shapes.h"

/* Two ranks that can be spliced, 4 -> 2 with 2 slots, which each row below spoils in one way. */
struct pair {
	struct kvs_layout *prefill;
	struct kvs_layout *decode;
};

static void pair_make(struct pair *p, const char *type)
{
	p->prefill = shape_layout(4, 1, 16, 1);
	p->decode = shape_layout(2, 0, 16, 1);
	shape_component(p->prefill, 0, type, KVS_ORDER_NHD, 2, 1600, 800, 8);
	shape_component(p->decode, 0, type, KVS_ORDER_NHD, 2, 3200, 1600, 8);
}

static void pair_free(struct pair *p)
{
	kvs_layout_free(p->prefill);
	kvs_layout_free(p->decode);
}

static void set_item(struct kvs_layout *layout, uint32_t tensor, uint64_t item_len)
{
	layout->components[0].tensors[tensor].item_len = item_len;
	layout->components[0].tensors[tensor].length = 8 * item_len;
}

static void set_tp(struct kvs_layout *layout, uint32_t size, uint32_t rank)
{
	layout->tp_size = size;
	layout->tp_rank = rank;
}

static void drop_last(struct kvs_layout *layout)
{
	layout->components[0].tensor_count--;
}

static void layout_bad(struct pair *p)
{
	p->decode->tp_rank = 2;
}

static void length_not_whole(struct pair *p)
{
	p->prefill->components[0].tensors[3].length++;
}

static void component_missing(struct pair *p)
{
	kvs_layout_free(p->decode);
	p->decode = shape_layout(2, 0, 16, 1);
	(void)snprintf(p->decode->components[0].type, KVS_NAME_SIZE, "kv");
}

static void type_differs(struct pair *p)
{
	(void)snprintf(p->decode->components[0].type, KVS_NAME_SIZE, "block_scale");
}

static void type_other(struct pair *p)
{
	(void)snprintf(p->prefill->components[0].type, KVS_NAME_SIZE, "mamba");
	(void)snprintf(p->decode->components[0].type, KVS_NAME_SIZE, "mamba");
}

static void type_unknown(struct pair *p)
{
	(void)snprintf(p->prefill->components[0].type, KVS_NAME_SIZE, "tomorrow");
	(void)snprintf(p->decode->components[0].type, KVS_NAME_SIZE, "tomorrow");
}

static void tp_not_multiple(struct pair *p)
{
	set_tp(p->decode, 3, 0);
}

static void ranks_apart(struct pair *p)
{
	p->decode->tp_rank = 1;
}

static void page_differs(struct pair *p)
{
	p->decode->page_size = 8;
}

static void dtype_differs(struct pair *p)
{
	strcpy(p->decode->dtype, "fp8_e5m2");
}

static void dtype_unknown(struct pair *p)
{
	p->prefill->dtype[0] = '\0';
}

static void order_differs(struct pair *p)
{
	p->decode->components[0].order = KVS_ORDER_HND;
}

static void order_unknown(struct pair *p)
{
	p->prefill->components[0].order = KVS_ORDER_UNKNOWN;
	p->decode->components[0].order = KVS_ORDER_UNKNOWN;
}

static void order_differs_whole(struct pair *p)
{
	set_item(p->prefill, 0, 3200);
	p->prefill->tp_rank = 0;
	p->decode->components[0].order = KVS_ORDER_UNKNOWN;
}

static void tensors_differ(struct pair *p)
{
	drop_last(p->decode);
}

static void layer_lacks_v(struct pair *p)
{
	shape_layer_ids(p->prefill, 0, 2, 5);
	shape_layer_ids(p->decode, 0, 2, 5);
	drop_last(p->decode);
}

static void layer_missing(struct pair *p)
{
	shape_layer_ids(p->prefill, 0, 2, 5);
	shape_layer_ids(p->decode, 0, 2, 5);
	p->prefill->components[0].tensors[0].layer_id = 9;
	p->prefill->components[0].tensors[2].layer_id = 9;
	drop_last(p->prefill);
}

static void stage_without_ids(struct pair *p)
{
	p->prefill->pp_size = 2;
	p->prefill->pp_rank = 1;
}

static void stages_apart_without_ids(struct pair *p)
{
	p->prefill->pp_size = 3;
	p->prefill->pp_rank = 1;
	p->decode->pp_size = 3;
	p->decode->pp_rank = 2;
	shape_layer_ids(p->prefill, 0, 2, 0);
}

static void lengths_no_ratio(struct pair *p)
{
	set_item(p->decode, 3, 2000);
}

static void lengths_ratio_too_large(struct pair *p)
{
	set_item(p->decode, 3, 3200);
}

static void lengths_no_divisor(struct pair *p)
{
	set_tp(p->prefill, 8, 1);
	set_item(p->decode, 0, 4800);
}

static void lengths_turned(struct pair *p)
{
	set_item(p->decode, 3, 400);
}

static void length_one_side(struct pair *p)
{
	set_item(p->decode, 3, 0);
}

static void length_other_side(struct pair *p)
{
	set_item(p->prefill, 0, 0);
}

static void page_not_divisor(struct pair *p)
{
	set_item(p->prefill, 0, 1601);
}

static void padded_prefill(struct pair *p)
{
	set_tp(p->prefill, 8, 0);
	p->prefill->head_rule = KVS_HEADS_PADDED;
}

static void padded_decode_whole(struct pair *p)
{
	set_tp(p->prefill, 1, 0);
	p->decode->head_rule = KVS_HEADS_PADDED;
	set_item(p->prefill, 0, 3200);
}

/* What a row expects in the text beside the component, both TP sizes and the remedy. */
static const struct {
	const char *name;
	enum kvs_refusal refusal;
	void (*spoil)(struct pair *);
	const char *words[4];
} rows[] = {
        {"rank past the size", KVS_REFUSE_LAYOUT, layout_bad, {"decode", "rank 2", "size 2"}},
        {"length of no whole items", KVS_REFUSE_LAYOUT, length_not_whole, {"prefill", "tensor 3", "6401", "800"}},
        {"items not of whole tokens", KVS_REFUSE_LAYOUT, page_not_divisor, {"tensor 0", "1601", "16 tokens"}},
        {"types differ", KVS_REFUSE_COMPONENTS, type_differs, {"block_scale", "swa", "1600 and 3200"}},
        {"other component", KVS_REFUSE_COMPONENTS, component_missing, {"kv", "swa", "1600 and 0"}},
        {"not ours", KVS_REFUSE_TYPE, type_other, {"mamba", "left to the connector", "1600 and 3200"}},
        {"unknown type", KVS_REFUSE_TYPE, type_unknown, {"tomorrow", "not known", "1600 and 3200"}},
        {"no multiple", KVS_REFUSE_TP, tp_not_multiple, {"4 is not a whole multiple of 3", "1600 and 3200"}},
        {"ranks apart", KVS_REFUSE_RANKS, ranks_apart, {"rank 1 does not serve decode rank 1", "1600 and 3200"}},
        {"page size", KVS_REFUSE_PAGE_SIZE, page_differs, {"16 tokens", "8 on", "1600 and 3200"}},
        {"dtype", KVS_REFUSE_DTYPE, dtype_differs, {"bfloat16", "fp8_e5m2", "1600 and 3200"}},
        {"unknown dtype", KVS_REFUSE_DTYPE, dtype_unknown, {"unknown", "bfloat16", "1600 and 3200"}},
        {"orders differ", KVS_REFUSE_ORDER, order_differs, {"NHD", "HND", "1600 and 3200"}},
        {"order unknown", KVS_REFUSE_ORDER, order_unknown, {"unknown", "1600 and 3200"}},
        {"orders differ, whole", KVS_REFUSE_ORDER, order_differs_whole, {"NHD", "unknown", "3200 and 3200"}},
        {"tensor counts", KVS_REFUSE_TENSORS, tensors_differ, {"4 tensors", "3 on", "no layer ids"}},
        {"V missing", KVS_REFUSE_TENSORS, layer_lacks_v, {"layer 6", "2 tensors", "1 on"}},
        {"layer missing", KVS_REFUSE_TENSORS, layer_missing, {"layer 5", "0 tensors", "2 on"}},
        {"stage without ids", KVS_REFUSE_LAYER_IDS, stage_without_ids, {"stage 1 of 2", "stage 0 of 1", "4 and 4"}},
        {"stages apart", KVS_REFUSE_LAYER_IDS, stages_apart_without_ids, {"stage 1 of 3", "stage 2 of 3"}},
        {"no ratio", KVS_REFUSE_LENGTHS, lengths_no_ratio, {"800 and 2000", "tensor 3"}},
        {"ratio too large", KVS_REFUSE_LENGTHS, lengths_ratio_too_large, {"800 and 3200", "2 prefill ranks"}},
        {"no divisor", KVS_REFUSE_LENGTHS, lengths_no_divisor, {"1600 and 4800", "4 prefill ranks"}},
        {"wrong way", KVS_REFUSE_LENGTHS, lengths_turned, {"800 and 400"}},
        {"decode holds nothing", KVS_REFUSE_LENGTHS, length_one_side, {"800 and 0", "only the prefill"}},
        {"prefill holds nothing", KVS_REFUSE_LENGTHS, length_other_side, {"0 and 3200", "only the decode"}},
        {"padded prefill", KVS_REFUSE_PADDED_HEADS, padded_prefill, {"2 ranks", "the prefill pads", "1600 and 3200"}},
        {"padded decode",
         KVS_REFUSE_PADDED_HEADS,
         padded_decode_whole,
         {"2 ranks", "the decode pads", "3200 and 3200"}},
};

#define ROWS (sizeof(rows) / sizeof(rows[0]))

static bool ends_with(const char *text, const char *end)
{
	size_t n = strlen(text);
	size_t m = strlen(end);

	return n >= m && !strcmp(text + n - m, end);
}

static void text_check(const char *name, const struct pair *p, const struct kvs_verdict *verdict,
                       enum kvs_refusal refusal)
{
	char sizes[80];

	cr_assert_eq(verdict->action, KVS_ACT_REFUSE, "%s", name);
	cr_assert_eq(verdict->refusal, refusal, "%s: %s: %s", name, kvs_refusal_name(verdict->refusal),
	             verdict->text.s);
	(void)snprintf(sizes, sizeof(sizes), "prefill_tp_size=%u, decode_tp_size=%u", p->prefill->tp_size,
	               p->decode->tp_size);
	cr_assert_not_null(strstr(verdict->text.s, sizes), "%s: %s", name, verdict->text.s);
	cr_assert(ends_with(verdict->text.s, kvs_refusal_remedy(refusal)), "%s: %s", name, verdict->text.s);
}

Test(policy_refusals, each_row_names_its_numbers)
{
	static const int32_t item = 1;
	size_t i;
	size_t j;

	for (i = 0; i < ROWS; i++) {
		struct kvs_verdict verdict;
		struct kvs_plan *plan;
		struct pair p;

		pair_make(&p, "swa");
		rows[i].spoil(&p);
		kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
		text_check(rows[i].name, &p, &verdict, rows[i].refusal);
		cr_assert(rows[i].refusal == KVS_REFUSE_LAYOUT ||
		          strstr(verdict.text.s, p.prefill->components[0].type));
		for (j = 0; j < 4 && rows[i].words[j]; j++)
			cr_assert_not_null(strstr(verdict.text.s, rows[i].words[j]), "%s: %s in %s", rows[i].name,
			                   rows[i].words[j], verdict.text.s);
		memset(&verdict, 0, sizeof(verdict));
		cr_assert_not(kvs_plan_build(p.prefill, p.decode, 0, &item, 1, &item, 1, &plan, &verdict));
		cr_assert_null(plan);
		text_check(rows[i].name, &p, &verdict, rows[i].refusal);
		pair_free(&p);
	}
}

/* The unspoiled pair is accepted, so that each row above is refused for its own reason. */
Test(policy_refusals, the_pair_itself_is_accepted)
{
	struct kvs_verdict verdict;
	struct pair p;

	pair_make(&p, "swa");
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_SLICE);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_NONE);
	cr_assert_str_empty(verdict.text.s);
	pair_free(&p);
}

Test(policy_refusals, every_refusal_has_a_row)
{
	bool seen[KVS_REFUSAL_COUNT] = {false};
	unsigned int r;
	size_t i;

	seen[KVS_REFUSE_NONE] = true;
	seen[KVS_REFUSE_INDICES] = true; /* by the plan alone, below */
	for (i = 0; i < ROWS; i++)
		seen[rows[i].refusal] = true;
	for (r = 0; r < KVS_REFUSAL_COUNT; r++) {
		cr_assert(seen[r], "%s", kvs_refusal_name(r));
		cr_assert_str_not_empty(kvs_refusal_name(r));
		cr_assert_eq(kvs_refusal_remedy(r)[0] == '\0', r == KVS_REFUSE_NONE);
	}
	cr_assert_str_eq(kvs_refusal_name(KVS_REFUSAL_COUNT), "unknown");
	cr_assert_str_empty(kvs_refusal_remedy(KVS_REFUSAL_COUNT));
}

Test(policy_refusals, component_past_the_end)
{
	struct kvs_verdict verdict;
	struct kvs_split split;
	uint32_t pairs[4];
	struct pair p;

	pair_make(&p, "swa");
	kvs_policy_judge(p.prefill, p.decode, 1, false, &verdict);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_COMPONENTS);
	cr_assert_not_null(strstr(verdict.text.s, "component 1"));
	cr_assert_not(kvs_policy_pair(p.prefill, p.decode, UINT32_MAX, pairs, &verdict));
	cr_assert_eq(verdict.refusal, KVS_REFUSE_COMPONENTS);
	cr_assert_not(kvs_policy_split(p.prefill, p.decode, 0, 4, 0, &split, &verdict));
	cr_assert_eq(verdict.refusal, KVS_REFUSE_TENSORS);
	cr_assert_not(kvs_policy_split(p.prefill, p.decode, 0, 0, 4, &split, &verdict));
	cr_assert_eq(verdict.refusal, KVS_REFUSE_TENSORS);
	pair_free(&p);
}

Test(policy_refusals, no_layout)
{
	struct kvs_verdict verdict;
	struct kvs_plan *plan;
	struct pair p;

	pair_make(&p, "swa");
	kvs_policy_judge(NULL, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_LAYOUT);
	kvs_policy_judge(p.prefill, NULL, 0, false, &verdict);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_LAYOUT);
	cr_assert_not(kvs_plan_build(NULL, NULL, 0, NULL, 0, NULL, 0, &plan, &verdict));
	cr_assert_eq(verdict.refusal, KVS_REFUSE_LAYOUT);
	pair_free(&p);
}

/* Item lists that do not fit: the numbers, and nothing built. */
Test(policy_refusals, indices)
{
	static const struct {
		int32_t src[2];
		int32_t dst[2];
		const char *words;
	} lists[] = {
	        {{-1, 0}, {0, 1}, "entry 0 of the item lists is -1 on the prefill, 0 on the decode"},
	        {{0, 1}, {0, INT32_MIN}, "entry 1 of the item lists is 1 on the prefill, -2147483648 on the decode"},
	        {{0, 8}, {0, 1}, "item 8 of tensor 0 of the prefill, which has only 8"},
	        {{0, 1}, {INT32_MAX, 1}, "item 2147483647 of tensor 0 of the decode, which has only 8"},
	};
	struct kvs_verdict verdict;
	struct kvs_plan *plan;
	struct pair p;
	size_t i;

	pair_make(&p, "swa");
	for (i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
		cr_assert_not(
		        kvs_plan_build(p.prefill, p.decode, 0, lists[i].src, 2, lists[i].dst, 2, &plan, &verdict));
		cr_assert_null(plan);
		text_check(lists[i].words, &p, &verdict, KVS_REFUSE_INDICES);
		cr_assert_not_null(strstr(verdict.text.s, lists[i].words), "%s", verdict.text.s);
	}
	cr_assert_not(kvs_plan_build(p.prefill, p.decode, 0, NULL, 2, lists[0].dst, 2, &plan, &verdict));
	cr_assert_eq(verdict.refusal, KVS_REFUSE_INDICES);
	/* What the shorter list does not pair is not looked at. */
	cr_assert(kvs_plan_build(p.prefill, p.decode, 0, lists[2].src, 2, lists[2].dst, 1, &plan, &verdict));
	kvs_plan_free(plan);
	/* One short tensor among several is found, whichever it is, at a skipped rank too. */
	for (i = 0; i < 4; i++) {
		p.decode->components[0].tensors[i].length -= p.decode->components[0].tensors[i].item_len;
		cr_assert_not(kvs_plan_build(p.prefill, p.decode, 0, (const int32_t[]){7}, 1, (const int32_t[]){7}, 1,
		                             &plan, &verdict));
		cr_assert_not_null(strstr(verdict.text.s, "of the decode, which has only 7"));
		p.decode->components[0].tensors[i].length += p.decode->components[0].tensors[i].item_len;
	}
	pair_free(&p);
	pair_make(&p, "minimax_dense_kv");
	cr_assert_not(kvs_plan_build(p.prefill, p.decode, 0, lists[2].src, 1, lists[2].dst, 2, &plan, &verdict));
	text_check("exact", &p, &verdict, KVS_REFUSE_INDICES);
	cr_assert_not_null(strstr(verdict.text.s, "1 items on the prefill, 2 on the decode"));
	pair_free(&p);
}

/* The largest of everything: the remedy is not cut off. */
Test(policy_refusals, longest_text)
{
	struct kvs_verdict verdict;
	struct pair p;

	pair_make(&p, "swa");
	memset(p.prefill->components[0].type, 't', KVS_NAME_SIZE - 1);
	memset(p.decode->components[0].type, 'u', KVS_NAME_SIZE - 1);
	p.prefill->components[0].type[KVS_NAME_SIZE - 1] = '\0';
	p.decode->components[0].type[KVS_NAME_SIZE - 1] = '\0';
	set_tp(p.prefill, UINT32_MAX, 1);
	set_tp(p.decode, UINT32_MAX - 1, 0);
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	text_check("types", &p, &verdict, KVS_REFUSE_COMPONENTS);
	memcpy(p.decode->components[0].type, p.prefill->components[0].type, KVS_NAME_SIZE);
	p.decode->components[0].tensors[2].length = UINT64_MAX;
	p.decode->components[0].tensors[2].item_len = UINT64_MAX - 1;
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	text_check("layout", &p, &verdict, KVS_REFUSE_LAYOUT);
	pair_free(&p);
}

/* A whole component has nothing to slice: order and padding do not matter to it, lengths and dtype do. */
Test(policy_refusals, whole_components)
{
	struct kvs_verdict verdict;
	struct pair p;

	pair_make(&p, "minimax_index_k");
	set_item(p.decode, 0, 1600);
	set_item(p.decode, 1, 1600);
	set_item(p.decode, 2, 800);
	set_item(p.decode, 3, 800);
	p.prefill->components[0].order = KVS_ORDER_UNKNOWN;
	p.prefill->head_rule = KVS_HEADS_PADDED;
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_SKIP, "%s", verdict.text.s);
	p.prefill->tp_rank = 0;
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_COPY);
	/* Scaled after all: as heads, with all that takes. */
	set_item(p.decode, 0, 3200);
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_ORDER);
	p.prefill->components[0].order = KVS_ORDER_NHD;
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_SLICE);
	set_item(p.prefill, 0, 1601);
	set_item(p.decode, 0, 3202);
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	text_check("page", &p, &verdict, KVS_REFUSE_LENGTHS);
	cr_assert_not_null(strstr(verdict.text.s, "1601 bytes are not divisible by the page size of 16"));
	/* Equal ones need no whole number of tokens. */
	set_item(p.decode, 0, 1601);
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_COPY);
	dtype_unknown(&p);
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.refusal, KVS_REFUSE_DTYPE);
	pair_free(&p);
	/* A row is not a page: nothing says how it would be sliced. */
	pair_make(&p, "swa_ring");
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	text_check("row", &p, &verdict, KVS_REFUSE_LENGTHS);
	cr_assert_not_null(strstr(verdict.text.s, "1600 and 3200"));
	pair_free(&p);
}

/* Padding is harmless where no two ranks would share a head. */
Test(policy_refusals, padded_without_sharing)
{
	struct kvs_verdict verdict;
	struct pair p;

	pair_make(&p, "swa");
	p.prefill->head_rule = KVS_HEADS_PADDED;
	p.decode->head_rule = KVS_HEADS_PADDED;
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_SLICE);
	/* n = 1 at different TP sizes is replication of everything. */
	set_item(p.decode, 0, 1600);
	p.prefill->tp_rank = 0;
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	text_check("whole", &p, &verdict, KVS_REFUSE_PADDED_HEADS);
	pair_free(&p);
}

Test(policy_refusals, equal_tp)
{
	struct kvs_verdict verdict;
	struct pair p;

	pair_make(&p, "swa");
	set_tp(p.prefill, 2, 0);
	p.decode->page_size = 4;
	strcpy(p.decode->dtype, "fp8_e5m2");
	kvs_policy_judge(p.prefill, p.decode, 0, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_PASS);
	kvs_policy_judge(p.prefill, p.decode, 99, false, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_PASS);
	kvs_policy_judge(p.prefill, p.decode, 0, true, &verdict);
	text_check("page", &p, &verdict, KVS_REFUSE_PAGE_SIZE);
	p.decode->page_size = 16;
	kvs_policy_judge(p.prefill, p.decode, 0, true, &verdict);
	text_check("dtype", &p, &verdict, KVS_REFUSE_DTYPE);
	p.decode->dtype[0] = '\0'; /* not told, and lengths that are equal */
	kvs_policy_judge(p.prefill, p.decode, 0, true, &verdict);
	text_check("lengths", &p, &verdict, KVS_REFUSE_LENGTHS);
	set_item(p.decode, 0, 1600);
	set_item(p.decode, 1, 1600);
	set_item(p.decode, 2, 800);
	set_item(p.decode, 3, 800);
	kvs_policy_judge(p.prefill, p.decode, 0, true, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_COPY, "%s", verdict.text.s);
	p.decode->head_rule = KVS_HEADS_PADDED;
	kvs_policy_judge(p.prefill, p.decode, 0, true, &verdict);
	text_check("padding", &p, &verdict, KVS_REFUSE_PADDED_HEADS);
	p.prefill->head_rule = KVS_HEADS_PADDED;
	kvs_policy_judge(p.prefill, p.decode, 0, true, &verdict);
	cr_assert_eq(verdict.action, KVS_ACT_COPY);
	set_tp(p.prefill, 2, 1);
	kvs_policy_judge(p.prefill, p.decode, 0, true, &verdict);
	text_check("ranks", &p, &verdict, KVS_REFUSE_RANKS);
	pair_free(&p);
}
