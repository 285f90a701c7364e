/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts as real models register them, for tests. Everything here fails the running test when memory runs out. */
#ifndef KVS_TEST_SHAPES_H
#define KVS_TEST_SHAPES_H

#include "policy/layout.h"

/* Zeroed memory, freed with free. */
void *shape_take(size_t size);

/*
 * A rank with so many empty components, dtype bfloat16, no pipeline, replicated heads. Freed with kvs_layout_free, as
 * all layouts.
 */
struct kvs_layout *shape_layout(uint32_t tp_size, uint32_t tp_rank, uint32_t page_size, uint32_t component_count);

/*
 * Fill a component in SGLang's order: K of every layer, then V of every layer (none when v_item is 0), items of each
 * tensor as given, no addresses, no layer ids.
 */
void shape_component(struct kvs_layout *layout, uint32_t component, const char *type, enum kvs_page_order order,
                     uint32_t layers, uint64_t k_item, uint64_t v_item, uint64_t items);

/* Give the tensors global layer ids: first_layer .. for K, the same again for V. */
void shape_layer_ids(struct kvs_layout *layout, uint32_t component, uint32_t layers, int32_t first_layer);

/* KV heads that a rank holds: each its share, or one that it shares when there are fewer heads than ranks. */
uint32_t shape_heads(uint32_t total_heads, uint32_t tp_size);

/* Bytes of a page of such a rank; width: bytes of one head of one token. */
uint64_t shape_item(uint32_t total_heads, uint32_t tp_size, uint32_t page_size, uint32_t width);

/* Can a model with so many heads run on so many ranks? */
bool shape_valid(uint32_t total_heads, uint32_t tp_size);

/* A rank with one component 0, "kv", in NHD: the common case. */
struct kvs_layout *shape_kv(uint32_t tp_size, uint32_t tp_rank, uint32_t page_size, uint32_t layers, uint64_t k_item,
                            uint64_t v_item, uint64_t items);

#endif
