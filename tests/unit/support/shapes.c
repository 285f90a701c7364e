/* SPDX-License-Identifier: Apache-2.0 */
#include "shapes.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

void *shape_take(size_t size)
{
	void *p = calloc(1, size ? size : 1);

	cr_assert_not_null(p);
	return p;
}

struct kvs_layout *shape_layout(uint32_t tp_size, uint32_t tp_rank, uint32_t page_size, uint32_t component_count)
{
	struct kvs_layout *layout = kvs_layout_new(component_count);

	cr_assert_not_null(layout);
	layout->tp_size = tp_size;
	layout->tp_rank = tp_rank;
	layout->pp_size = 1;
	layout->page_size = page_size;
	(void)snprintf(layout->dtype, sizeof(layout->dtype), "bfloat16");
	return layout;
}

void shape_component(struct kvs_layout *layout, uint32_t component, const char *type, enum kvs_page_order order,
                     uint32_t layers, uint64_t k_item, uint64_t v_item, uint64_t items)
{
	struct kvs_component *c = &layout->components[component];
	uint32_t count = v_item ? 2 * layers : layers;
	uint32_t i;

	(void)snprintf(c->type, sizeof(c->type), "%s", type);
	c->order = order;
	cr_assert(kvs_layout_set_tensors(layout, component, count));
	for (i = 0; i < count; i++) {
		c->tensors[i].item_len = i < layers ? k_item : v_item;
		c->tensors[i].length = c->tensors[i].item_len * items;
		c->tensors[i].layer_id = KVS_NO_LAYER;
	}
}

void shape_layer_ids(struct kvs_layout *layout, uint32_t component, uint32_t layers, int32_t first_layer)
{
	struct kvs_component *c = &layout->components[component];
	uint32_t i;

	for (i = 0; i < c->tensor_count; i++)
		c->tensors[i].layer_id = first_layer + (int32_t)(i % layers);
}

uint32_t shape_heads(uint32_t total_heads, uint32_t tp_size)
{
	return total_heads > tp_size ? total_heads / tp_size : 1;
}

uint64_t shape_item(uint32_t total_heads, uint32_t tp_size, uint32_t page_size, uint32_t width)
{
	return (uint64_t)shape_heads(total_heads, tp_size) * page_size * width;
}

bool shape_valid(uint32_t total_heads, uint32_t tp_size)
{
	return total_heads % tp_size == 0 || tp_size % total_heads == 0;
}

struct kvs_layout *shape_kv(uint32_t tp_size, uint32_t tp_rank, uint32_t page_size, uint32_t layers, uint64_t k_item,
                            uint64_t v_item, uint64_t items)
{
	struct kvs_layout *layout = shape_layout(tp_size, tp_rank, page_size, 1);

	shape_component(layout, 0, "kv", KVS_ORDER_NHD, layers, k_item, v_item, items);
	return layout;
}
