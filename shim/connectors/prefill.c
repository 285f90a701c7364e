/* SPDX-License-Identifier: Apache-2.0 */
#include "prefill.h"

#include <string.h>

#include "../../policy/state.h"
#include "../../transport/log.h"
#include "../options.h"
#include "../python/signature.h"
#include "cleared.h"

static KvsPyObject *name_values; /* "values" */

/* ---- messages ---- */

/* original(cls, message without our frame): the object, with frame_p filled where there was one. */
static KvsPyObject *parse(const struct kvs_replaced *call, const char *parameter, struct kvs_frame *frame_p)
{
	frame_p->size = 0;
	KvsPyObject *message = kvs_py_argument(call->args, call->kwargs, 0, parameter);
	KvsPyObject *rest = message ? kvs_sglang_take_frame(message, frame_p) : NULL;
	if (!rest) {
		frame_p->size = 0;
		return kvs_replaced_call(call);
	}
	KvsPyObject *result = kvs_py.PyObject_CallFunctionObjArgs(call->original, call->self, rest, NULL);
	kvs_py.Py_DecRef(rest);
	return result;
}

KvsPyObject *kvs_prefill_register_info(const struct kvs_replaced *call, const char *parameter, KvsPyObject *info_class)
{
	struct kvs_frame frame;
	KvsPyObject *info = parse(call, parameter, &frame);
	if (info && frame.size && kvs_py_is_exact(info, info_class))
		kvs_splice_add_peer(info, &frame);
	return info;
}

KvsPyObject *kvs_prefill_transfer_info(const struct kvs_replaced *call, const char *parameter, KvsPyObject *info_class)
{
	struct kvs_frame frame;
	KvsPyObject *info = parse(call, parameter, &frame);
	if (info && frame.size && kvs_py_is_exact(info, info_class))
		kvs_splice_set_generation(info, &frame);
	return info;
}

KvsPyObject *kvs_prefill_argument(const struct kvs_replaced *call, const char *name)
{
	ssize_t index = kvs_signature_index(call->original, name);
	return index < 1 ? NULL : kvs_py_argument(call->args, call->kwargs, index - 1, name);
}

/* ---- tables ---- */

KvsPyObject *kvs_prefill_peer(KvsPyObject *manager, KvsPyObject *key)
{
	KvsPyObject *table = kvs_py_attr(manager, "decode_kv_args_table");
	KvsPyObject *info = table && key ? kvs_py.PyObject_GetItem(table, key) : NULL;
	if (!info)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(table);
	return info;
}

/* The rooms' dictionaries of transfer infos, oldest first, new; NULL: none. */
static KvsPyObject *list_rooms(KvsPyObject *manager)
{
	if (!name_values)
		name_values = kvs_py.PyUnicode_FromString("values");
	KvsPyObject *rooms = kvs_py_attr(manager, "transfer_infos");
	KvsPyObject *values = rooms && name_values ? kvs_py.PyObject_CallMethodObjArgs(rooms, name_values, NULL) : NULL;
	KvsPyObject *list = values ? kvs_py.PySequence_List(values) : NULL;
	if (!list)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(values);
	kvs_py.Py_DecRef(rooms);
	return list;
}

/* What a transfer info is looked for by. */
struct wanted {
	const char *attribute;
	KvsPyObject *object; /* the attribute itself */
	KvsPyObject *base;   /* or this one */
	int64_t number;      /* where object is NULL */
};

static bool is_wanted(KvsPyObject *request, const struct wanted *wanted)
{
	int64_t number;
	if (!wanted->object)
		return kvs_py_attr_i64(request, wanted->attribute, &number) && number == wanted->number;
	KvsPyObject *value = kvs_py_attr(request, wanted->attribute);
	bool yes = value && (value == wanted->object || value == wanted->base);
	kvs_py.Py_DecRef(value);
	return yes;
}

static KvsPyObject *find_in(KvsPyObject *list, KvsPyObject *key, const struct wanted *wanted)
{
	KvsPyObject *found = NULL;
	/* The newest room is the likeliest. */
	for (ssize_t i = list ? kvs_py.PyList_Size(list) - 1 : -1; !found && i >= 0; i--) {
		KvsPyObject *request = kvs_py.PyObject_GetItem(kvs_py.PyList_GetItem(list, i), key);
		if (request && is_wanted(request, wanted))
			found = request;
		else
			kvs_py.Py_DecRef(request);
		kvs_py.PyErr_Clear();
	}
	kvs_py.Py_DecRef(list);
	return found;
}

static KvsPyObject *find_request(KvsPyObject *manager, KvsPyObject *key, const struct wanted *wanted)
{
	KvsPyObject *found = find_in(list_rooms(manager), key, wanted);
	return found ? found : find_in(kvs_cleared_list(manager), key, wanted);
}

KvsPyObject *kvs_prefill_request(KvsPyObject *manager, KvsPyObject *key, const char *attribute, KvsPyObject *object)
{
	KvsPyObject *base = kvs_py_attr(object, "base");
	struct wanted wanted = {.attribute = attribute, .object = object, .base = base == kvs_py.none ? NULL : base};
	KvsPyObject *found = object && key ? find_request(manager, key, &wanted) : NULL;
	kvs_py.Py_DecRef(base);
	return found;
}

KvsPyObject *kvs_prefill_request_numbered(KvsPyObject *manager, KvsPyObject *key, const char *attribute, int64_t number)
{
	struct wanted wanted = {.attribute = attribute, .number = number};
	return key ? find_request(manager, key, &wanted) : NULL;
}

/* ---- what is ours ---- */

/* Upstream's slicing of the KV pool takes one length for all its buffers. */
static bool one_length(const struct kvs_component *kv)
{
	for (uint32_t i = 1; i < kv->tensor_count; i++)
		if (kv->tensors[i].item_len != kv->tensors[0].item_len)
			return false;
	return true;
}

/*
 * A pipeline stage whose layers could not be paired with the decode's by us, while the connector knows which layers it
 * has. Where state of ours would be refused for the same reason the KV is not sent for nothing.
 */
static bool stage_without_ids(const struct kvs_layout *layout)
{
	const struct kvs_component *kv = &layout->components[KVS_COMPONENT_KV];
	for (uint32_t c = 1; c < layout->component_count; c++) {
		const struct kvs_state_row *row = kvs_state_find(layout->components[c].type);
		if (row && row->sharding != KVS_SHARD_OTHER)
			return false;
	}
	return layout->pp_size > 1 && kv->tensor_count > 0 && kv->tensors[0].layer_id == KVS_NO_LAYER;
}

/* More ranks than KV heads on either side: which head a rank holds was wrong upstream until 0.5.16 (mooncake), 0.5.17
 * (nixl), 0.5.21 (mori), with status Success. */
static bool ranks_share_heads(KvsPyObject *manager, KvsPyObject *info)
{
	int64_t own = 0, theirs = 0, heads = 0;
	KvsPyObject *kv_args = kvs_py_attr(manager, "kv_args");
	kvs_py_attr_i64(manager, "attn_tp_size", &own);
	kvs_splice_peer_tp_size(info, &theirs);
	bool known = kv_args && kvs_py_attr_i64(kv_args, "total_kv_head_num", &heads) && heads > 0;
	kvs_py.Py_DecRef(kv_args);
	return !known || own > heads || theirs > heads;
}

bool kvs_prefill_kv_is_ours(KvsPyObject *manager, KvsPyObject *info)
{
	struct kvs_manager *m = kvs_sglang_manager(manager);
	if (!m || !info)
		return false;
	if (kvs_options()->policy == KVS_POLICY_ALL)
		return true;
	if (!kvs_splice_tp_differs(manager, info))
		return kvs_sglang_splices_equal(m, KVS_COMPONENT_KV);
	bool upstream_is_right =
	        one_length(&m->layout->components[KVS_COMPONENT_KV]) && !ranks_share_heads(manager, info);
	return !upstream_is_right || (kvs_options()->policy != KVS_POLICY_REFUSED && !stage_without_ids(m->layout));
}

enum kvs_sent kvs_prefill_send_kv(struct kvs_send *send, KvsPyObject *key)
{
	send->component = KVS_COMPONENT_KV;
	if (!send->src_items || !send->dst_items || !send->info)
		return KVS_SENT_STOCK;
	if (!kvs_sglang_manager(send->manager))
		kvs_splice_observe(send->manager, send->info);
	if (!kvs_prefill_kv_is_ours(send->manager, send->info))
		return KVS_SENT_STOCK;
	send->request = kvs_prefill_request(send->manager, key, "dst_kv_indices", send->dst_items);
	if (send->request)
		return kvs_splice_send(send);
	static bool told;
	if (!told)
		kvs_log(KVS_LOG_WARN, "a KV chunk belongs to no room that is known: it is left to the connector");
	told = true;
	return KVS_SENT_STOCK;
}

bool kvs_prefill_failed(KvsPyObject *manager, KvsPyObject *request)
{
	return kvs_splice_request_failed(manager, request, NULL);
}

void kvs_prefill_raise(KvsPyObject *manager, KvsPyObject *request)
{
	struct kvs_text text = {""};
	bool known = kvs_splice_request_failed(manager, request, &text) && text.s[0];
	kvs_sglang_raise(known ? text.s : "kvsplice: the room was closed before its transfer ended");
}

static bool state_is_ours(const struct kvs_states *states, uint32_t index)
{
	char type[KVS_NAME_SIZE];
	if (!kvs_sglang_state_type(states->send.manager, index, type))
		return false;
	const struct kvs_state_row *row = kvs_state_find(type);
	if (!row || row->sharding == KVS_SHARD_OTHER)
		return false;
	if (kvs_options()->policy == KVS_POLICY_ALL)
		return true;
	if (states->copies && states->copies(states->send.manager, type))
		return false;
	return kvs_options()->policy != KVS_POLICY_REFUSED || !states->slices(states->send.manager, type);
}

/* Nothing to send: upstream skips it, and counts on nobody hearing of it. */
static bool is_empty(KvsPyObject *items)
{
	ssize_t size = items == kvs_py.none ? 0 : kvs_py.PySequence_Size(items);
	if (size < 0)
		kvs_py.PyErr_Clear();
	return size == 0;
}

static enum kvs_sent send_state(struct kvs_states *states, uint32_t index, KvsPyObject *src_items)
{
	if (!state_is_ours(states, index))
		return KVS_SENT_STOCK;
	KvsPyObject *dst_items = kvs_py.PySequence_GetItem(states->dst_lists, (ssize_t)index);
	if (!dst_items)
		kvs_py.PyErr_Clear();
	struct kvs_send send = states->send;
	send.component = 1 + index;
	send.src_items = src_items;
	send.dst_items = dst_items;
	enum kvs_sent sent = kvs_splice_send(&send);
	kvs_py.Py_DecRef(dst_items);
	return sent;
}

bool kvs_prefill_states(struct kvs_states *states, bool *left_p)
{
	_Static_assert(KVS_MAX_COMPONENTS <= 32, "a bit for each component");
	uint32_t in_place = 0;
	*left_p = false;
	for (ssize_t i = 0; i < kvs_py.PyList_Size(states->rest); i++) {
		KvsPyObject *src_items = kvs_py.PyList_GetItem(states->rest, i);
		if (is_empty(src_items)) {
			*left_p = *left_p || (src_items != kvs_py.none && !state_is_ours(states, (uint32_t)i));
			continue;
		}
		enum kvs_sent sent = send_state(states, (uint32_t)i, src_items);
		if (sent == KVS_SENT_STOCK) {
			*left_p = true;
			continue;
		}
		if (sent == KVS_SENT_DONE)
			in_place |= 1U << i;
		kvs_py.Py_IncRef(kvs_py.none);
		kvs_py.PyList_SetItem(states->rest, i, kvs_py.none);
	}
	/* A room that failed moves nothing more, and nobody hears of what did move: the rest is not sent either. */
	if (kvs_prefill_failed(states->send.manager, states->send.request)) {
		*left_p = false;
		return true;
	}
	for (uint32_t i = 0; states->done && i < KVS_MAX_COMPONENTS; i++) {
		if ((in_place >> i & 1) != 0 && !states->done(states->call, i))
			return false;
	}
	return true;
}
