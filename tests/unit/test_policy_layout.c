/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts by themselves, the state table, texts. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "policy/layout.h"
#include "policy/state.h"
#include "support/shapes.h"

static struct kvs_layout *sane(void)
{
	return shape_kv(4, 1, 16, 2, 1600, 800, 8);
}

/* Fails the check, and the text says it in these words. */
static void expect_bad(struct kvs_layout *layout, const char *words)
{
	struct kvs_text text;

	cr_assert_not(kvs_layout_check(layout, &text), "%s", words);
	cr_assert_not_null(strstr(text.s, words), "%s", text.s);
	cr_assert_not(kvs_layout_check(layout, NULL));
	kvs_layout_free(layout);
}

#define SPOILT(change, words) \
	do { \
		struct kvs_layout *l = sane(); \
		change; \
		expect_bad(l, words); \
	} while (0)

Test(policy_layout, malformed)
{
	struct kvs_layout *layout = sane();
	struct kvs_text text;

	cr_assert(kvs_layout_check(layout, &text));
	kvs_layout_free(layout);
	expect_bad(NULL, "no layout");
	expect_bad(kvs_layout_new(1), "rank 0 is not below the size 0");
	SPOILT(l->tp_size = 0, "rank 1 is not below the size 0");
	SPOILT(l->tp_rank = 4, "rank 4 is not below the size 4");
	SPOILT(l->pp_size = 0, "pipeline-parallel rank 0");
	SPOILT(l->pp_rank = 1, "rank 1 is not below the size 1");
	SPOILT(l->page_size = 0, "page size is 0");
	SPOILT(memset(l->dtype, 'x', KVS_NAME_SIZE), "dtype");
	SPOILT(strcpy(l->dtype, "bf\n16"), "dtype");
	SPOILT(l->head_rule = (enum kvs_head_rule)7, "head rule 7");
	SPOILT(memset(l->components[0].type, 'x', KVS_NAME_SIZE), "component 0");
	SPOILT(strcpy(l->components[0].type, "kv\x1b[2J"), "component 0");
	SPOILT(strcpy(l->components[0].type, "kv\xff"), "component 0");
	SPOILT(l->components[0].type[0] = '\0', "component 0");
	SPOILT(l->components[0].order = (enum kvs_page_order)3, "order 3");
	SPOILT(l->components[0].tensors[1].layer_id = -2, "tensor 1: layer id -2");
	SPOILT(l->components[0].tensors[2].length = 799, "799 bytes are not a whole number of items of 800");
	SPOILT(l->components[0].tensors[3].address = UINT64_MAX - 6399, "pass the end");
	SPOILT((l->components[0].tensors[0].item_len = 8, l->components[0].tensors[0].length = 80), "page size of 16");
}

Test(policy_layout, counts)
{
	struct kvs_component components[1] = {{.type = "kv", .tensor_count = KVS_MAX_TENSORS + 1}};
	struct kvs_tensor tensor = {.layer_id = KVS_NO_LAYER};
	struct kvs_layout layout = {.tp_size = 1, .pp_size = 1, .page_size = 1};
	struct kvs_text text;

	cr_assert_not(kvs_layout_check(&layout, &text));
	cr_assert_not_null(strstr(text.s, "0 components"));
	layout.component_count = KVS_MAX_COMPONENTS + 1;
	layout.components = components;
	cr_assert_not(kvs_layout_check(&layout, &text));
	cr_assert_not_null(strstr(text.s, "33 components"));
	cr_assert_null(kvs_layout_clone(&layout));
	layout.component_count = 1;
	components[0].tensors = &tensor;
	cr_assert_not(kvs_layout_check(&layout, &text));
	cr_assert_not_null(strstr(text.s, "4097 tensors"));
	cr_assert_null(kvs_layout_clone(&layout));
	components[0].tensor_count = 1;
	components[0].tensors = NULL;
	cr_assert_not(kvs_layout_check(&layout, &text));
	components[0].tensor_count = 0;
	cr_assert(kvs_layout_check(&layout, &text), "%s", text.s);
}

Test(policy_layout, edges_that_are_sane)
{
	struct kvs_layout *l = sane();

	/* The last byte of the address space, a tensor of no items, one that is not held. */
	l->components[0].tensors[0].address = UINT64_MAX - l->components[0].tensors[0].length;
	l->components[0].tensors[1].length = 0;
	l->components[0].tensors[2].item_len = 0;
	cr_assert(kvs_layout_check(l, NULL));
	/* Rows need no whole number of tokens. */
	strcpy(l->components[0].type, "c128_state");
	l->components[0].tensors[3].item_len = 7;
	l->components[0].tensors[3].length = 70;
	cr_assert(kvs_layout_check(l, NULL));
	kvs_layout_free(l);
}

Test(policy_layout, ownership)
{
	struct kvs_layout *layout = shape_layout(4, 1, 16, 3);
	struct kvs_layout *copy;

	cr_assert_null(kvs_layout_new(KVS_MAX_COMPONENTS + 1));
	cr_assert_null(kvs_layout_clone(NULL));
	kvs_layout_free(NULL);
	cr_assert_not(kvs_layout_set_tensors(NULL, 0, 1));
	cr_assert_not(kvs_layout_set_tensors(layout, 3, 1));
	cr_assert_not(kvs_layout_set_tensors(layout, 0, KVS_MAX_TENSORS + 1));
	shape_component(layout, 0, "kv", KVS_ORDER_HND, 2, 1600, 800, 8);
	cr_assert_not(kvs_layout_set_tensors(layout, 0, 1));
	shape_component(layout, 1, "swa", KVS_ORDER_NHD, 0, 16, 0, 1);
	cr_assert_not(kvs_layout_set_tensors(layout, 1, 1));
	shape_component(layout, 2, "dsa", KVS_ORDER_UNKNOWN, 1, 16, 0, 1);
	layout->components[0].tensors[3].address = 0x1000;
	layout->head_rule = KVS_HEADS_PADDED;
	copy = kvs_layout_clone(layout);
	cr_assert_not_null(copy);
	cr_assert_eq(copy->tp_size, 4);
	cr_assert_eq(copy->head_rule, KVS_HEADS_PADDED);
	cr_assert_str_eq(copy->dtype, "bfloat16");
	cr_assert_eq(copy->component_count, 3);
	cr_assert_neq(copy->components, layout->components);
	cr_assert_neq(copy->components[0].tensors, layout->components[0].tensors);
	kvs_layout_free(layout);
	cr_assert_str_eq(copy->components[0].type, "kv");
	cr_assert_eq(copy->components[0].order, KVS_ORDER_HND);
	cr_assert_eq(copy->components[0].tensors[3].address, 0x1000);
	cr_assert_eq(copy->components[1].tensor_count, 0);
	cr_assert_eq(copy->components[2].tensors[0].item_len, 16);
	cr_assert(kvs_layout_check(copy, NULL));
	kvs_layout_free(copy);
}

Test(policy_layout, state_table)
{
	cr_assert_eq(kvs_state_find("kv")->sharding, KVS_SHARD_HEADS);
	cr_assert_eq(kvs_state_find("swa")->index_rule, KVS_INDEX_TRUNCATE);
	cr_assert_eq(kvs_state_find("minimax_dense_kv")->index_rule, KVS_INDEX_EXACT);
	cr_assert_eq(kvs_state_find("minimax_index_k")->sharding, KVS_SHARD_WHOLE);
	cr_assert_eq(kvs_state_find("swa_ring")->unit, KVS_ITEM_ROW);
	cr_assert_eq(kvs_state_find("mamba")->sharding, KVS_SHARD_OTHER);
	cr_assert_null(kvs_state_find("SWA"));
	cr_assert_null(kvs_state_find("swa "));
	cr_assert_null(kvs_state_find(""));
	cr_assert_null(kvs_state_find(NULL));
}

Test(policy_layout, texts)
{
	char longer[KVS_TEXT_SIZE + 100];
	struct kvs_text text;

	kvs_text_set(NULL, "%d", 1);
	kvs_text_set(&text, "%s=%d", "a", 1);
	cr_assert_str_eq(text.s, "a=1");
	memset(longer, 'x', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = '\0';
	kvs_text_set(&text, "%s", longer);
	cr_assert_eq(strlen(text.s), KVS_TEXT_SIZE - 1);
}
