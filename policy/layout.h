/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one rank registered with its connector: the neutral form of SGLang's KVArgs.
 *
 * A component is a list of tensors that are sent together (the full-attention KV pool, the sliding-window pool, ...).
 * A tensor is an array of items (pages or rows) of item_len bytes. Component 0 is always the full-attention pool, state
 * component i of the connector is component i + 1.
 */
#ifndef KVS_POLICY_LAYOUT_H
#define KVS_POLICY_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text.h"

#define KVS_NAME_SIZE      32
#define KVS_MAX_COMPONENTS 32
#define KVS_MAX_TENSORS    4096 /* per component: far above any model, bounds what a peer can make us allocate */
#define KVS_COMPONENT_KV   0
#define KVS_NO_LAYER       (-1)

/* How the bytes of one item are ordered. Anything that is not one of the two known orders is refused when slicing. */
enum kvs_page_order {
	KVS_ORDER_UNKNOWN,
	KVS_ORDER_NHD, /* [token][local head][head bytes] */
	KVS_ORDER_HND, /* [local head][token][head bytes] */
};

/*
 * What more tensor-parallel ranks than KV heads means on this server. A GPU server holds head r / rep on rank r
 * (replicated); a CPU server pads the model with zero heads instead (SGLang, adjust_config_with_unaligned_cpu_tp), with
 * the same item lengths. Only the first can be spliced.
 */
enum kvs_head_rule {
	KVS_HEADS_REPLICATED,
	KVS_HEADS_PADDED,
};

struct kvs_tensor {
	uint64_t address;  /* in its owner's process; 0 in a layout received from a peer */
	uint64_t length;   /* bytes registered */
	uint64_t item_len; /* bytes of one item; 0: this rank does not hold the tensor */
	int32_t layer_id;  /* global layer, or KVS_NO_LAYER where the release does not say */
};

struct kvs_component {
	char type[KVS_NAME_SIZE]; /* SGLang's StateType value ("swa", ...), or "kv" for component 0 */
	enum kvs_page_order order;
	uint32_t tensor_count;
	struct kvs_tensor *tensors;
};

struct kvs_layout {
	uint32_t tp_size; /* attention tensor-parallel size, at least 1 */
	uint32_t tp_rank; /* engine_rank % tp_size */
	uint32_t pp_size;
	uint32_t pp_rank;
	uint32_t page_size; /* tokens */
	char dtype[KVS_NAME_SIZE];
	enum kvs_head_rule head_rule;
	uint32_t component_count;
	struct kvs_component *components;
};

/* Allocate an empty layout of so many components. NULL: out of memory, or more than KVS_MAX_COMPONENTS. */
struct kvs_layout *kvs_layout_new(uint32_t component_count);

/* Give a component its (zeroed) tensors. False: out of memory, set already, or more than KVS_MAX_TENSORS. */
bool kvs_layout_set_tensors(struct kvs_layout *layout, uint32_t component, uint32_t tensor_count);

/* Deep copy, owned by the caller; NULL: out of memory, or no layout, or one with counts above the limits. */
struct kvs_layout *kvs_layout_clone(const struct kvs_layout *layout);

/* NULL is accepted. */
void kvs_layout_free(struct kvs_layout *layout);

/*
 * Is this layout sane by itself? At least one component, sizes at least 1, ranks below sizes, known orders and head
 * rules, names NUL-terminated and of printable ASCII (they end up in logs), lengths whole numbers of items, address +
 * length without wrap, layer ids not negative unless KVS_NO_LAYER, head-sharded items divisible by the page size. text
 * (may be NULL) says what is not. NULL is not sane. Pure; any thread.
 */
bool kvs_layout_check(const struct kvs_layout *layout, struct kvs_text *text);

#endif
