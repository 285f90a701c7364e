/* SPDX-License-Identifier: Apache-2.0 */
#include "layout.h"

#include <stdlib.h>
#include <string.h>

#include "state.h"

struct kvs_layout *kvs_layout_new(uint32_t component_count)
{
	struct kvs_layout *layout;

	if (component_count > KVS_MAX_COMPONENTS)
		return NULL;
	layout = calloc(1, sizeof(*layout));
	if (!layout)
		return NULL;
	layout->components = calloc(component_count ? component_count : 1, sizeof(*layout->components));
	if (!layout->components) {
		free(layout);
		return NULL;
	}
	layout->component_count = component_count;
	return layout;
}

bool kvs_layout_set_tensors(struct kvs_layout *layout, uint32_t component, uint32_t tensor_count)
{
	struct kvs_component *c;

	if (!layout || component >= layout->component_count || tensor_count > KVS_MAX_TENSORS)
		return false;
	c = &layout->components[component];
	if (c->tensors)
		return false;
	c->tensors = calloc(tensor_count ? tensor_count : 1, sizeof(*c->tensors));
	if (!c->tensors)
		return false;
	c->tensor_count = tensor_count;
	return true;
}

struct kvs_layout *kvs_layout_clone(const struct kvs_layout *layout)
{
	struct kvs_component *components;
	struct kvs_layout *copy;
	uint32_t i;

	if (!layout)
		return NULL;
	copy = kvs_layout_new(layout->component_count);
	if (!copy)
		return NULL;
	components = copy->components;
	*copy = *layout;
	copy->components = components;
	for (i = 0; i < layout->component_count; i++) {
		const struct kvs_component *from = &layout->components[i];
		struct kvs_component *to = &components[i];

		memcpy(to->type, from->type, sizeof(to->type));
		to->order = from->order;
		if (!kvs_layout_set_tensors(copy, i, from->tensor_count)) {
			kvs_layout_free(copy);
			return NULL;
		}
		if (from->tensor_count)
			memcpy(to->tensors, from->tensors, from->tensor_count * sizeof(*to->tensors));
	}
	return copy;
}

void kvs_layout_free(struct kvs_layout *layout)
{
	uint32_t i;

	if (!layout)
		return;
	for (i = 0; i < layout->component_count; i++)
		free(layout->components[i].tensors);
	free(layout->components);
	free(layout);
}

/* Names come from a peer and go into logs: no control characters, and an end. */
static bool name_ok(const char name[KVS_NAME_SIZE])
{
	size_t i;

	for (i = 0; i < KVS_NAME_SIZE; i++) {
		if (!name[i])
			return true;
		if (name[i] < ' ' || name[i] > '~')
			return false;
	}
	return false;
}

static bool tensor_check(const struct kvs_layout *layout, const struct kvs_component *component, uint32_t index,
                         struct kvs_text *text)
{
	const struct kvs_state_row *row = kvs_state_find(component->type);
	const struct kvs_tensor *tensor = &component->tensors[index];
	unsigned long long address = tensor->address;
	unsigned long long length = tensor->length;
	unsigned long long item_len = tensor->item_len;

	if (tensor->layer_id < KVS_NO_LAYER) {
		kvs_text_set(text, "%s tensor %u: layer id %d is negative", component->type, index, tensor->layer_id);
		return false;
	}
	if (address > UINT64_MAX - length) {
		kvs_text_set(text, "%s tensor %u: %llu bytes at address 0x%llx pass the end of the address space",
		             component->type, index, length, address);
		return false;
	}
	if (!item_len)
		return true;
	if (length % item_len) {
		kvs_text_set(text, "%s tensor %u: %llu bytes are not a whole number of items of %llu bytes",
		             component->type, index, length, item_len);
		return false;
	}
	if (row && row->sharding == KVS_SHARD_HEADS && row->unit == KVS_ITEM_PAGE && item_len % layout->page_size) {
		kvs_text_set(text, "%s tensor %u: an item of %llu bytes is not divisible by the page size of %u tokens",
		             component->type, index, item_len, layout->page_size);
		return false;
	}
	return true;
}

static bool component_check(const struct kvs_layout *layout, uint32_t index, struct kvs_text *text)
{
	const struct kvs_component *component = &layout->components[index];
	uint32_t i;

	if (!name_ok(component->type) || !component->type[0]) {
		kvs_text_set(text, "component %u: its type is empty, not terminated or not printable", index);
		return false;
	}
	if (component->order != KVS_ORDER_UNKNOWN && component->order != KVS_ORDER_NHD &&
	    component->order != KVS_ORDER_HND) {
		kvs_text_set(text, "component %s: page order %d is not one of the known ones", component->type,
		             (int)component->order);
		return false;
	}
	if (component->tensor_count > KVS_MAX_TENSORS || (component->tensor_count && !component->tensors)) {
		kvs_text_set(text, "component %s: %u tensors, %s (limit %d)", component->type, component->tensor_count,
		             component->tensors ? "too many" : "none given", KVS_MAX_TENSORS);
		return false;
	}
	for (i = 0; i < component->tensor_count; i++)
		if (!tensor_check(layout, component, i, text))
			return false;
	return true;
}

bool kvs_layout_check(const struct kvs_layout *layout, struct kvs_text *text)
{
	uint32_t i;

	if (!layout) {
		kvs_text_set(text, "no layout");
		return false;
	}
	if (layout->tp_rank >= layout->tp_size) {
		kvs_text_set(text, "tensor-parallel rank %u is not below the size %u", layout->tp_rank,
		             layout->tp_size);
		return false;
	}
	if (layout->pp_rank >= layout->pp_size) {
		kvs_text_set(text, "pipeline-parallel rank %u is not below the size %u", layout->pp_rank,
		             layout->pp_size);
		return false;
	}
	if (!layout->page_size) {
		kvs_text_set(text, "the page size is 0 tokens");
		return false;
	}
	if (!name_ok(layout->dtype)) {
		kvs_text_set(text, "the dtype name is not terminated or not printable");
		return false;
	}
	if (layout->head_rule != KVS_HEADS_REPLICATED && layout->head_rule != KVS_HEADS_PADDED) {
		kvs_text_set(text, "head rule %d is not one of the known ones", (int)layout->head_rule);
		return false;
	}
	if (!layout->component_count || layout->component_count > KVS_MAX_COMPONENTS || !layout->components) {
		kvs_text_set(text, "%u components (1 to %d are possible)", layout->component_count, KVS_MAX_COMPONENTS);
		return false;
	}
	for (i = 0; i < layout->component_count; i++)
		if (!component_check(layout, i, text))
			return false;
	return true;
}
