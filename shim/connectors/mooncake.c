/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SGLang's mooncake connector (sglang/srt/disaggregation/mooncake/conn.py), both roles.
 *
 * Its transfer worker lives only as long as nothing is raised in it and blacklists the decode rank on a non-zero result
 * of a KV or state call; a non-zero send_aux fails one room, on both sides, and nothing else (the same in 0.5.12 to
 * 0.5.23). So every failure of ours marks the room, and send_aux of a marked room returns -1 instead of sending.
 */
#include <stdio.h>
#include <string.h>

#include "../../policy/state.h"
#include "../../transport/log.h"
#include "../options.h"
#include "bare.h"
#include "connector.h"
#include "rooms.h"
#include "sglang.h"
#include "splice.h"

/*
 * What is replaced, one row each: id, class, method, kind, parameters, where the class is kept. A row makes the pointer
 * to the original and the entry in its role's table.
 */
#define REGISTRATION_TABLE(X) \
	X(register_buffers, "MooncakeKVManager", "register_buffer_to_engine", KVS_METHOD, "self", &manager_class) \
	X(deregister_buffers, "MooncakeKVManager", "deregister_buffer_to_engine", KVS_METHOD, "self", NULL)

#define PREFILL_TABLE(X) \
	X(register_info, "KVArgsRegisterInfo", "from_zmq", KVS_CLASSMETHOD, "cls msg", &register_info_class) \
	X(transfer_info, "TransferInfo", "from_zmq", KVS_CLASSMETHOD, "cls msg", &transfer_info_class) \
	X(send_kvcache, "MooncakeKVManager", "send_kvcache", KVS_METHOD, \
	  "self mooncake_session_id prefill_kv_indices dst_kv_ptrs dst_kv_indices executor", NULL) \
	X(send_kvcache_slice, "MooncakeKVManager", "send_kvcache_slice", KVS_METHOD, \
	  "self mooncake_session_id prefill_kv_indices dst_kv_ptrs dst_kv_indices dst_tp_rank dst_attn_tp_size " \
	  "dst_kv_item_len executor", \
	  NULL) \
	X(maybe_send_extra, "MooncakeKVManager", "maybe_send_extra", KVS_METHOD, \
	  "self req prefill_state_indices executor target_rank_registration_info", NULL) \
	X(send_aux, "MooncakeKVManager", "send_aux", KVS_METHOD, "self req prefill_aux_index dst_aux_ptrs", NULL) \
	X(sender_init, "MooncakeKVSender", "__init__", KVS_METHOD, "self mgr bootstrap_addr bootstrap_room ...", \
	  &sender_class) \
	X(sender_abort, "MooncakeKVSender", "abort", KVS_METHOD, "self", NULL) \
	X(sender_failure, "MooncakeKVSender", "failure_exception", KVS_METHOD, "self", NULL) \
	X(sender_clear, "MooncakeKVSender", "clear", KVS_METHOD, "self", NULL)

#define DECODE_TABLE(X) \
	X(receiver_register, "MooncakeKVReceiver", "_register_kv_args", KVS_METHOD, "self", &receiver_class) \
	X(receiver_connect, "MooncakeKVReceiver", "_connect_to_bootstrap_server", KVS_CLASSMETHOD, \
	  "cls bootstrap_info", NULL) \
	X(receiver_metadata, "MooncakeKVReceiver", "send_metadata", KVS_METHOD, \
	  "self kv_indices aux_index state_indices", NULL) \
	X(receiver_poll, "MooncakeKVReceiver", "poll", KVS_METHOD, "self", NULL) \
	X(receiver_abort, "MooncakeKVReceiver", "abort", KVS_METHOD, "self", NULL) \
	X(receiver_failure, "MooncakeKVReceiver", "failure_exception", KVS_METHOD, "self", NULL) \
	X(receiver_clear, "MooncakeKVReceiver", "clear", KVS_METHOD, "self", NULL)

static KvsPyObject *name_values; /* "values" */
static KvsPyObject *manager_class, *register_info_class, *transfer_info_class, *sender_class, *receiver_class;

#define X(id, class_name, name, kind, parameters, class_p) \
	static KvsPyObject *original_##id; \
	static KvsPyObject *replace_##id(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs);
REGISTRATION_TABLE(X)
PREFILL_TABLE(X)
DECODE_TABLE(X)
#undef X

#define CALL(id) (&(struct kvs_replaced){original_##id, self, args, kwargs})

/* A method whose whole replacement is a shared function, for objects of exactly our class. */
#define FORWARD(id, class_object, function) \
	static KvsPyObject *replace_##id(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs) \
	{ \
		return kvs_py_is_exact(self, class_object) ? function(CALL(id)) : kvs_replaced_call(CALL(id)); \
	}

FORWARD(sender_init, sender_class, kvs_sender_init)
FORWARD(sender_abort, sender_class, kvs_sender_cancel)
FORWARD(sender_failure, sender_class, kvs_sender_cancel)
FORWARD(sender_clear, sender_class, kvs_sender_clear)
FORWARD(receiver_register, receiver_class, kvs_receiver_register)
FORWARD(receiver_metadata, receiver_class, kvs_receiver_metadata)
FORWARD(receiver_poll, receiver_class, kvs_receiver_poll)
FORWARD(receiver_abort, receiver_class, kvs_receiver_close)
FORWARD(receiver_failure, receiver_class, kvs_receiver_close)
FORWARD(receiver_clear, receiver_class, kvs_receiver_close)

static KvsPyObject *replace_receiver_connect(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return kvs_sglang_connect(original_receiver_connect, self, args, kwargs);
}

/* ---- registration ---- */

static KvsPyObject *replace_register_buffers(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *result = kvs_replaced_call(CALL(register_buffers));
	if (result && kvs_py_is_exact(self, manager_class))
		kvs_sglang_register(self);
	return result;
}

static KvsPyObject *replace_deregister_buffers(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	if (kvs_py_is_exact(self, manager_class))
		kvs_sglang_unregister(self);
	return kvs_replaced_call(CALL(deregister_buffers));
}

/* original(cls, message without our frame): the object, with frame_p filled where there was one. */
static KvsPyObject *parse(const struct kvs_replaced *call, struct kvs_frame *frame_p)
{
	frame_p->size = 0;
	KvsPyObject *message = kvs_py_argument(call->args, call->kwargs, 0, "msg");
	KvsPyObject *rest = message ? kvs_sglang_take_frame(message, frame_p) : NULL;
	if (!rest) {
		frame_p->size = 0;
		return kvs_replaced_call(call);
	}
	KvsPyObject *result = kvs_py.PyObject_CallFunctionObjArgs(call->original, call->self, rest, NULL);
	kvs_py.Py_DecRef(rest);
	return result;
}

/* On the bootstrap thread, which must neither fail nor wait: the record is stored, no more. */
static KvsPyObject *replace_register_info(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	struct kvs_frame frame;
	KvsPyObject *info = parse(CALL(register_info), &frame);
	if (info && frame.size && kvs_py_is_exact(info, register_info_class))
		kvs_splice_add_peer(info, &frame);
	return info;
}

static KvsPyObject *replace_transfer_info(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	struct kvs_frame frame;
	KvsPyObject *info = parse(CALL(transfer_info), &frame);
	if (info && frame.size && kvs_py_is_exact(info, transfer_info_class))
		kvs_splice_set_generation(info, &frame);
	return info;
}

/* ---- sending ---- */

/* manager.table[key], new; NULL when absent. */
static KvsPyObject *looked_up(KvsPyObject *manager, const char *table, KvsPyObject *key)
{
	KvsPyObject *dict = kvs_py_attr(manager, table);
	KvsPyObject *value = dict && key ? kvs_py.PyObject_GetItem(dict, key) : NULL;
	if (!value)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(dict);
	return value;
}

/*
 * The transfer info whose dst_kv_indices this array is a view of, new. The KV calls name no room, but their destination
 * list is a slice of exactly one room's array (transfer_worker, 0.5.12 to 0.5.23). NULL: not found.
 */
static KvsPyObject *request_of(KvsPyObject *manager, KvsPyObject *session, KvsPyObject *dst_indices)
{
	KvsPyObject *rooms = kvs_py_attr(manager, "transfer_infos");
	KvsPyObject *base = kvs_py_attr(dst_indices, "base");
	KvsPyObject *snapshot = rooms ? kvs_py.PyObject_CallMethodObjArgs(rooms, name_values, NULL) : NULL;
	KvsPyObject *list = snapshot ? kvs_py.PySequence_List(snapshot) : NULL;
	KvsPyObject *found = NULL;
	ssize_t count = list ? kvs_py.PyList_Size(list) : 0;
	/* The newest room is the likeliest. */
	for (ssize_t i = count - 1; !found && i >= 0; i--) {
		KvsPyObject *request = kvs_py.PyObject_GetItem(kvs_py.PyList_GetItem(list, i), session);
		KvsPyObject *indices = request ? kvs_py_attr(request, "dst_kv_indices") : NULL;
		if (indices && (indices == base || indices == dst_indices)) {
			found = request;
			kvs_py.Py_IncRef(found);
		}
		kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(indices);
		kvs_py.Py_DecRef(request);
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(list);
	kvs_py.Py_DecRef(snapshot);
	kvs_py.Py_DecRef(base);
	kvs_py.Py_DecRef(rooms);
	return found;
}

/* Do K and V of this server's KV pool differ in length? Upstream's slicing takes one length for both. */
static bool upstream_slices_kv(KvsPyObject *manager)
{
	struct kvs_manager *m = kvs_sglang_manager(manager);
	const struct kvs_component *kv = m ? &m->layout->components[KVS_COMPONENT_KV] : NULL;
	for (uint32_t i = 1; kv && i < kv->tensor_count; i++)
		if (kv->tensors[i].item_len != kv->tensors[0].item_len)
			return false;
	return true;
}

static enum kvs_sent send_kv(KvsPyObject *manager, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *session = kvs_py_argument(args, kwargs, 0, "mooncake_session_id");
	struct kvs_send send = {
	        .manager = manager,
	        .component = KVS_COMPONENT_KV,
	        .src_items = kvs_py_argument(args, kwargs, 1, "prefill_kv_indices"),
	        .dst_items = kvs_py_argument(args, kwargs, 3, "dst_kv_indices"),
	        .bare = &kvs_mooncake_bare,
	};
	if (!session || !send.src_items || !send.dst_items)
		return KVS_SENT_STOCK;
	send.info = looked_up(manager, "decode_kv_args_table", session);
	if (!kvs_sglang_manager(manager)) {
		kvs_splice_observe(manager, send.info);
		kvs_py.Py_DecRef(send.info);
		return KVS_SENT_STOCK;
	}
	send.request = send.info ? request_of(manager, session, send.dst_items) : NULL;
	enum kvs_sent sent = KVS_SENT_STOCK;
	if (send.request) {
		sent = kvs_splice_send(&send);
	} else if (send.info) {
		static bool told;
		if (!told)
			kvs_log(KVS_LOG_WARN,
			        "a KV chunk belongs to no room that is known: it is left to the connector");
		told = true;
	}
	kvs_py.Py_DecRef(send.request);
	kvs_py.Py_DecRef(send.info);
	return sent;
}

static KvsPyObject *zero_or(enum kvs_sent sent, const struct kvs_replaced *call)
{
	return sent == KVS_SENT_STOCK ? kvs_replaced_call(call) : kvs_py.PyLong_FromLongLong(0);
}

static KvsPyObject *replace_send_kvcache(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	enum kvs_sent sent = KVS_SENT_STOCK;
	/* Equal TP: ours only when everything is. */
	if (kvs_options()->policy == KVS_POLICY_ALL && kvs_py_is_exact(self, manager_class))
		sent = send_kv(self, args, kwargs);
	return zero_or(sent, CALL(send_kvcache));
}

static KvsPyObject *replace_send_kvcache_slice(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	enum kvs_sent sent = KVS_SENT_STOCK;
	if (kvs_py_is_exact(self, manager_class) &&
	    (kvs_options()->policy != KVS_POLICY_REFUSED || !upstream_slices_kv(self)))
		sent = send_kv(self, args, kwargs);
	return zero_or(sent, CALL(send_kvcache_slice));
}

/* Policy "refused": does this release slice the component itself, and rightly? */
static bool upstream_slices_state(KvsPyObject *manager, const char *type)
{
	KvsPyObject *method = strcmp(type, "swa") == 0 ? kvs_py_attr(manager, "_send_swa_state_slice") : NULL;
	kvs_py.Py_DecRef(method);
	return method != NULL;
}

/* Is state component i of this call one that the library looks at? */
static bool state_is_ours(KvsPyObject *manager, uint32_t index)
{
	char type[KVS_NAME_SIZE];
	if (!kvs_sglang_state_type(manager, index, type))
		return false;
	const struct kvs_state_row *row = kvs_state_find(type);
	if (!row || row->sharding == KVS_SHARD_OTHER)
		return false;
	return kvs_options()->policy != KVS_POLICY_REFUSED || !upstream_slices_state(manager, type);
}

/*
 * Send what is ours of a request's state and strike it from rest (a copy of prefill_state_indices): every release skips
 * a component whose entry is None. Returns whether anything is left for the original.
 */
static bool send_states(KvsPyObject *manager, KvsPyObject *request, KvsPyObject *info, KvsPyObject *rest)
{
	bool left = false;
	KvsPyObject *dst = kvs_py_attr(request, "dst_state_indices");
	for (ssize_t i = 0; i < kvs_py.PyList_Size(rest); i++) {
		KvsPyObject *src_items = kvs_py.PyList_GetItem(rest, i);
		if (src_items == kvs_py.none)
			continue;
		enum kvs_sent sent = KVS_SENT_STOCK;
		if (state_is_ours(manager, (uint32_t)i)) {
			KvsPyObject *dst_items = dst ? kvs_py.PySequence_GetItem(dst, i) : NULL;
			kvs_py.PyErr_Clear();
			struct kvs_send send = {
			        .manager = manager,
			        .info = info,
			        .request = request,
			        .component = 1 + (uint32_t)i,
			        .src_items = src_items,
			        .dst_items = dst_items,
			        .bare = &kvs_mooncake_bare,
			};
			sent = kvs_splice_send(&send);
			kvs_py.Py_DecRef(dst_items);
		}
		if (sent == KVS_SENT_STOCK) {
			left = true;
		} else {
			kvs_py.Py_IncRef(kvs_py.none);
			kvs_py.PyList_SetItem(rest, i, kvs_py.none);
		}
	}
	kvs_py.Py_DecRef(dst);
	return left;
}

static KvsPyObject *replace_maybe_send_extra(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	const struct kvs_replaced *call = CALL(maybe_send_extra);
	KvsPyObject *request = kvs_py_argument(args, kwargs, 0, "req");
	KvsPyObject *indices = kvs_py_argument(args, kwargs, 1, "prefill_state_indices");
	KvsPyObject *executor = kvs_py_argument(args, kwargs, 2, "executor");
	KvsPyObject *info = kvs_py_argument(args, kwargs, 3, "target_rank_registration_info");
	if (!kvs_py_is_exact(self, manager_class) || !request || !indices || !executor || !info || info == kvs_py.none)
		return kvs_replaced_call(call);
	if (!kvs_sglang_manager(self)) {
		kvs_splice_observe(self, info);
		return kvs_replaced_call(call);
	}
	KvsPyObject *rest = kvs_py.PySequence_List(indices);
	if (!rest) {
		kvs_py.PyErr_Clear();
		return kvs_replaced_call(call);
	}
	KvsPyObject *result;
	uint64_t room = 0;
	bool left = send_states(self, request, info, rest);
	/* A room that failed moves nothing more: the rest is not sent either. */
	if (left && kvs_sglang_room(request, "room", &room) && kvs_splice_failed(self, room, NULL))
		left = false;
	if (left)
		result = kvs_py.PyObject_CallFunctionObjArgs(call->original, self, request, rest, executor, info, NULL);
	else
		result = kvs_py.PyLong_FromLongLong(0);
	kvs_py.Py_DecRef(rest);
	return result;
}

static KvsPyObject *replace_send_aux(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *request = kvs_py_argument(args, kwargs, 0, "req");
	uint64_t room = 0;
	struct kvs_text text = {""};
	if (kvs_py_is_exact(self, manager_class) && request && kvs_sglang_room(request, "room", &room) &&
	    kvs_splice_failed(self, room, &text)) {
		kvs_sglang_record_failure(self, room, text.s);
		return kvs_py.PyLong_FromLongLong(-1);
	}
	return kvs_replaced_call(CALL(send_aux));
}

/* ---- the tables ---- */

static int prepare(KvsPyObject *module)
{
	(void)module;
	if (!name_values)
		name_values = kvs_py.PyUnicode_FromString("values");
	return name_values && kvs_sglang_prepare();
}

#define X(id, class, method, method_kind, parameter_list, class_slot) \
	{.class_name = (class), \
	 .name = (method), \
	 .kind = (method_kind), \
	 .parameters = (parameter_list), \
	 .replacement = replace_##id, \
	 .original_p = &original_##id, \
	 .class_p = (class_slot)},
static struct kvs_method registration_methods[] = {REGISTRATION_TABLE(X)};
static struct kvs_method prefill_methods[] = {PREFILL_TABLE(X)};
static struct kvs_method decode_methods[] = {DECODE_TABLE(X)};
#undef X

#define ROLE(role_name, table) \
	{ \
		.name = (role_name), .methods = (table), .method_count = sizeof(table) / sizeof((table)[0]) \
	}
static struct kvs_connector_role roles[] = {
        ROLE("registration", registration_methods),
        ROLE("prefill", prefill_methods),
        ROLE("decode", decode_methods),
};

struct kvs_connector kvs_mooncake = {
        .name = "mooncake",
        .module = "sglang.srt.disaggregation.mooncake.conn",
        .prepare = prepare,
        .roles = roles,
        .role_count = sizeof roles / sizeof roles[0],
};
