/* SPDX-License-Identifier: Apache-2.0 */
/* From a connector manager's kv_args to a neutral layout, and its registration with the agent. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../policy/state.h"
#include "../../transport/log.h"
#include "../../transport/memory.h"
#include "../log.h"
#include "../options.h"
#include "../preload.h"
#include "order.h"
#include "pools.h"

#define ATTRIBUTE "_kvsplice_manager"

/* ---- reading kv_args ---- */

/* object[index][position] of a list of lists; false: absent or no integer. */
static bool nested_u64(KvsPyObject *lists, uint32_t index, ssize_t position, uint64_t *value_p)
{
	KvsPyObject *list = lists ? kvs_py.PySequence_GetItem(lists, index) : NULL;
	KvsPyObject *item = list ? kvs_py.PySequence_GetItem(list, position) : NULL;
	bool ok = item != NULL;
	if (ok)
		*value_p = kvs_py.PyLong_AsUnsignedLongLong(item);
	if (kvs_py.PyErr_Occurred()) {
		kvs_py.PyErr_Clear();
		ok = false;
	}
	kvs_py.Py_DecRef(item);
	kvs_py.Py_DecRef(list);
	return ok;
}

static ssize_t length_of(KvsPyObject *sequence)
{
	ssize_t size = sequence ? kvs_py.PySequence_Size(sequence) : 0;
	if (size < 0)
		kvs_py.PyErr_Clear();
	return size < 0 ? 0 : size;
}

static ssize_t nested_length(KvsPyObject *lists, uint32_t index)
{
	if ((ssize_t)index >= length_of(lists))
		return 0;
	KvsPyObject *list = kvs_py.PySequence_GetItem(lists, index);
	ssize_t size = length_of(list);
	if (!list)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(list);
	return size;
}

/* kv_args' parallel lists of one kind of buffer, as lists of lists. */
struct buffers {
	KvsPyObject *ptrs;
	KvsPyObject *lens;
	KvsPyObject *item_lens;
	KvsPyObject *layer_ids;
};

static void buffers_drop(struct buffers *b)
{
	kvs_py.Py_DecRef(b->ptrs);
	kvs_py.Py_DecRef(b->lens);
	kvs_py.Py_DecRef(b->item_lens);
	kvs_py.Py_DecRef(b->layer_ids);
}

/* A flat list as a list of one list, so that the KV pool reads like a state component. New; NULL when absent. */
static KvsPyObject *wrapped(KvsPyObject *object, const char *name)
{
	KvsPyObject *list = kvs_py_attr(object, name);
	KvsPyObject *outer = list ? kvs_py.PyList_New(1) : NULL;
	if (!outer) {
		kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(list);
		return NULL;
	}
	kvs_py.PyList_SetItem(outer, 0, list);
	return outer;
}

static bool fill_tensors(struct kvs_layout *layout, uint32_t component, const struct buffers *b, uint32_t index,
                         struct kvs_text *text)
{
	struct kvs_component *c = &layout->components[component];
	ssize_t count = nested_length(b->ptrs, index);
	if (count != nested_length(b->lens, index) || count != nested_length(b->item_lens, index)) {
		kvs_text_set(text, "component %s lists %zd addresses, %zd lengths and %zd item lengths", c->type, count,
		             nested_length(b->lens, index), nested_length(b->item_lens, index));
		return false;
	}
	if (count > KVS_MAX_TENSORS || !kvs_layout_set_tensors(layout, component, (uint32_t)count)) {
		kvs_text_set(text, "component %s has %zd tensors; at most %d, and memory for them, are needed", c->type,
		             count, KVS_MAX_TENSORS);
		return false;
	}
	bool has_ids = count > 0 && nested_length(b->layer_ids, index) == count;
	for (ssize_t i = 0; i < count; i++) {
		struct kvs_tensor *t = &c->tensors[i];
		uint64_t id = 0;
		if (!nested_u64(b->ptrs, index, i, &t->address) || !nested_u64(b->lens, index, i, &t->length) ||
		    !nested_u64(b->item_lens, index, i, &t->item_len)) {
			kvs_text_set(text, "tensor %zd of component %s has no integer address, length or item length",
			             i, c->type);
			return false;
		}
		t->layer_id = has_ids && nested_u64(b->layer_ids, index, i, &id) && id <= INT32_MAX ? (int32_t)id
		                                                                                    : KVS_NO_LAYER;
	}
	return true;
}

bool kvs_sglang_state_type(KvsPyObject *manager, uint32_t index, char name_p[KVS_NAME_SIZE])
{
	KvsPyObject *kv_args = kvs_py_attr(manager, "kv_args");
	KvsPyObject *types = kv_args ? kvs_py_attr(kv_args, "state_types") : NULL;
	KvsPyObject *type = NULL;
	bool ok = false;
	if ((ssize_t)index < length_of(types))
		type = kvs_py.PySequence_GetItem(types, index);
	if (type)
		ok = kvs_py_attr_text(type, "value", name_p, KVS_NAME_SIZE);
	else
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(type);
	kvs_py.Py_DecRef(types);
	kvs_py.Py_DecRef(kv_args);
	return ok;
}

/* A CPU server pads heads where a GPU server replicates them: told apart by where the KV pool lives. */
static enum kvs_head_rule head_rule(const struct kvs_layout *layout)
{
	if (kvs_options()->cpu_heads == KVS_CPU_HEADS_REPLICATED)
		return KVS_HEADS_REPLICATED;
	for (uint32_t c = 0; c < layout->component_count; c++)
		for (uint32_t t = 0; t < layout->components[c].tensor_count; t++)
			if (layout->components[c].tensors[t].address)
				return kvs_memory_is_device(layout->components[c].tensors[t].address)
				               ? KVS_HEADS_REPLICATED
				               : KVS_HEADS_PADDED;
	return KVS_HEADS_PADDED;
}

static bool fill_numbers(struct kvs_layout *layout, KvsPyObject *manager, KvsPyObject *kv_args, struct kvs_text *text)
{
	int64_t tp = 0, rank = 0, page = 0, pp_size = 1, pp_rank = 0;
	if (!kvs_py_attr_i64(manager, "attn_tp_size", &tp) || tp < 1 || tp > INT32_MAX ||
	    !kvs_py_attr_i64(kv_args, "engine_rank", &rank) || rank < 0 ||
	    !kvs_py_attr_i64(kv_args, "page_size", &page) || page < 1 || page > INT32_MAX) {
		kvs_text_set(text, "attn_tp_size %lld, engine_rank %lld, page_size %lld make no sense", (long long)tp,
		             (long long)rank, (long long)page);
		return false;
	}
	kvs_py_attr_i64(manager, "pp_size", &pp_size);
	kvs_py_attr_i64(kv_args, "pp_rank", &pp_rank);
	layout->tp_size = (uint32_t)tp;
	layout->tp_rank = (uint32_t)(rank % tp);
	layout->pp_size = pp_size < 1 ? 1 : (uint32_t)pp_size;
	layout->pp_rank = pp_rank < 0 ? 0 : (uint32_t)pp_rank;
	layout->page_size = (uint32_t)page;
	if (!kvs_py_attr_text(kv_args, "kv_cache_dtype_str", layout->dtype, sizeof layout->dtype))
		kvs_py_attr_text(manager, "kv_cache_dtype_str", layout->dtype, sizeof layout->dtype);
	kvs_log_set_rank((int)rank);
	return true;
}

static bool fill_components(struct kvs_layout *layout, KvsPyObject *manager, KvsPyObject *kv_args,
                            struct kvs_text *text)
{
	struct buffers kv = {
	        .ptrs = wrapped(kv_args, "kv_data_ptrs"),
	        .lens = wrapped(kv_args, "kv_data_lens"),
	        .item_lens = wrapped(kv_args, "kv_item_lens"),
	        .layer_ids = wrapped(kv_args, "kv_layer_ids"),
	};
	struct buffers state = {
	        .ptrs = kvs_py_attr(kv_args, "state_data_ptrs"),
	        .lens = kvs_py_attr(kv_args, "state_data_lens"),
	        .item_lens = kvs_py_attr(kv_args, "state_item_lens"),
	        .layer_ids = kvs_py_attr(kv_args, "state_layer_ids"),
	};
	bool ok = true;
	for (uint32_t c = 0; ok && c < layout->component_count; c++) {
		struct kvs_component *component = &layout->components[c];
		if (c == KVS_COMPONENT_KV) {
			memcpy(component->type, "kv", sizeof "kv");
		} else if (!kvs_sglang_state_type(manager, c - 1, component->type)) {
			kvs_text_set(text, "state component %u has no type", c - 1);
			ok = false;
			break;
		}
		/* What is not ours is not described either: its entries may mean something else. */
		const struct kvs_state_row *row = kvs_state_find(component->type);
		if (row && row->sharding != KVS_SHARD_OTHER)
			ok = fill_tensors(layout, c, c == KVS_COMPONENT_KV ? &kv : &state,
			                  c == KVS_COMPONENT_KV ? 0 : c - 1, text);
		component->order = kvs_sglang_page_order(kv_args, component, layout->page_size);
	}
	buffers_drop(&kv);
	buffers_drop(&state);
	return ok;
}

static struct kvs_layout *describe(KvsPyObject *manager, struct kvs_text *text)
{
	KvsPyObject *kv_args = kvs_py_attr(manager, "kv_args");
	if (!kv_args) {
		kvs_text_set(text, "the manager has no kv_args");
		return NULL;
	}
	KvsPyObject *types = kvs_py_attr(kv_args, "state_types");
	ssize_t states = length_of(types);
	kvs_py.Py_DecRef(types);
	struct kvs_layout *layout = states < KVS_MAX_COMPONENTS ? kvs_layout_new(1 + (uint32_t)states) : NULL;
	if (!layout) {
		kvs_text_set(text, "%zd state components; at most %d, and memory for them, are needed", states,
		             KVS_MAX_COMPONENTS - 1);
	} else if (!fill_numbers(layout, manager, kv_args, text) || !fill_components(layout, manager, kv_args, text)) {
		kvs_layout_free(layout);
		layout = NULL;
	} else {
		kvs_pools_layer_ids(layout);
		layout->head_rule = head_rule(layout);
	}
	kvs_py.Py_DecRef(kv_args);
	return layout;
}

/* ---- registration ---- */

static pid_t configured_by;

/* Once per process, a forked child included, with the interpreter lock held. */
static void configure_agent(bool splice_equal_tp)
{
	if (configured_by == getpid())
		return;
	configured_by = getpid();
	const struct kvs_options *options = kvs_options();
	struct kvs_agent_config config = {
	        .timeout_ms = (uint32_t)options->timeout_ms,
	        .staging_bytes = (uint64_t)options->staging_mb << 20,
	        .transports = options->transport,
	        .listen = options->listen[0] ? options->listen : NULL,
	        .secret_file = options->secret_file[0] ? options->secret_file : NULL,
	        .stats_path = options->stats[0] ? options->stats : NULL,
	        .verify = options->verify,
	        .cuda_copy = (uint8_t)options->cuda_copy,
	        .rdma_device = options->rdma_device,
	        .rdma_gid = (int)options->rdma_gid_index + 1,
	        .rdma_service_level = (uint8_t)options->rdma_service_level,
	        .rdma_traffic_class = (uint8_t)options->rdma_traffic_class,
	        .splice_equal_tp = splice_equal_tp || options->policy == KVS_POLICY_ALL,
	};
	struct kvs_text text;
	if (!kvs_agent_configure(&config, &text))
		kvs_log(KVS_LOG_ERROR, "%s", text.s);
	kvs_preload_watch_forks();
}

static void manager_destroy(KvsPyObject *capsule)
{
	struct kvs_manager *m = kvs_py.PyCapsule_GetPointer(capsule, KVS_CAPSULE);
	if (!m)
		return;
	/* Runs inside the object's deallocation, where the interpreter lock is better kept; the agent never takes it,
	 * so the wait is the 2 ms of a piece in flight. */
	kvs_endpoint_remove(m->endpoint);
	kvs_layout_free(m->layout);
	free(m);
}

/* Does a buffer of the component differ in length from the first one, or from the one that is its K? */
static bool is_uneven(const struct kvs_component *c, bool from_first)
{
	uint32_t half = c->tensor_count / 2;
	for (uint32_t i = 0; from_first && i < c->tensor_count; i++)
		if (c->tensors[i].item_len != c->tensors[0].item_len)
			return true;
	for (uint32_t i = 0; i < half && c->tensor_count == 2 * half; i++)
		if (c->tensors[i].item_len != c->tensors[half + i].item_len)
			return true;
	return false;
}

/* The components that the connector would send wrong at equal TP, as kvs_manager has them. */
static uint32_t uneven_components(const struct kvs_layout *layout, uint32_t uneven)
{
	uint32_t bits = 0;
	for (uint32_t c = 0; c < layout->component_count; c++) {
		const struct kvs_state_row *row = kvs_state_find(layout->components[c].type);
		bool kv = c == KVS_COMPONENT_KV;
		if ((uneven & (kv ? KVS_UNEVEN_KV : KVS_UNEVEN_STATE)) && row && row->sharding == KVS_SHARD_HEADS &&
		    is_uneven(&layout->components[c], kv))
			bits |= UINT32_C(1) << c;
	}
	return bits;
}

bool kvs_sglang_splices_equal(const struct kvs_manager *m, uint32_t component)
{
	return component < KVS_MAX_COMPONENTS && (m->splice_equal >> component & 1);
}

/* The manager's role from disaggregation_mode, an enumeration whose value is "prefill" or "decode". */
static bool role_of(KvsPyObject *manager, enum kvs_role *role_p)
{
	char mode[KVS_NAME_SIZE] = "";
	KvsPyObject *object = kvs_py_attr(manager, "disaggregation_mode");
	bool ok = object && kvs_py_attr_text(object, "value", mode, sizeof mode);
	kvs_py.Py_DecRef(object);
	*role_p = strcmp(mode, "prefill") == 0 ? KVS_ROLE_PREFILL : KVS_ROLE_DECODE;
	return ok && (*role_p == KVS_ROLE_PREFILL || strcmp(mode, "decode") == 0);
}

void kvs_sglang_register(KvsPyObject *manager, uint32_t uneven)
{
	kvs_options_renew();
	if (!kvs_options()->enable || kvs_options()->policy == KVS_POLICY_OFF)
		return;
	/* MLA pools are the same on every rank, and the connectors handle them at any TP. */
	if (kvs_py_attr_true(manager, "is_mla_backend") || kvs_py_attr_true(manager, "is_hybrid_mla_backend")) {
		kvs_log(KVS_LOG_INFO, "this model's KV cache is not split over ranks (MLA): left to the connector");
		return;
	}
	struct kvs_text text = {""};
	struct kvs_manager *m = calloc(1, sizeof *m);
	char host[128] = "127.0.0.1";
	kvs_py_attr_text(manager, "local_ip", host, sizeof host);
	if (m && !role_of(manager, &m->role))
		kvs_text_set(&text, "its disaggregation_mode is neither prefill nor decode");
	else if (m)
		m->layout = describe(manager, &text);
	else
		kvs_text_set(&text, "out of memory");
	if (m && m->layout) {
		m->splice_equal = uneven_components(m->layout, uneven);
		configure_agent(m->splice_equal != 0);
		m->endpoint = kvs_endpoint_add(m->role, m->layout, host, &text);
	}
	if (!m || !m->endpoint) {
		kvs_log(KVS_LOG_WARN, "this server stays on the connector's own path: %s", text.s);
		if (m)
			kvs_layout_free(m->layout);
		free(m);
		return;
	}
	if (!kvs_sglang_attach(manager, ATTRIBUTE, m, manager_destroy))
		kvs_log(KVS_LOG_WARN, "this server stays on the connector's own path: its manager takes no attribute");
}

struct kvs_manager *kvs_sglang_manager(KvsPyObject *manager)
{
	struct kvs_manager *m = kvs_sglang_attached(manager, ATTRIBUTE);
	return m && m->endpoint ? m : NULL;
}

void kvs_sglang_unregister(KvsPyObject *manager)
{
	struct kvs_manager *m = kvs_sglang_attached(manager, ATTRIBUTE);
	if (!m || !m->endpoint)
		return;
	uint64_t endpoint = m->endpoint;
	m->endpoint = 0;
	void *state = kvs_py.PyEval_SaveThread();
	kvs_endpoint_remove(endpoint);
	kvs_py.PyEval_RestoreThread(state);
}
