/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SGLang's mooncake connector (sglang/srt/disaggregation/mooncake/conn.py), both roles.
 *
 * Its transfer worker lives only as long as nothing is raised in it and blacklists the decode rank on a non-zero result
 * of a KV or state call; a non-zero send_aux fails one room, on both sides, and nothing else (the same in 0.5.12 to
 * 0.5.23). So every failure of ours marks the room, and send_aux of a marked room returns -1 instead of sending.
 */
#include <string.h>

#include "bare.h"
#include "connector.h"
#include "prefill.h"

/*
 * What is replaced, one row each: id, class, method, kind, parameters, where the class is kept. A row makes the pointer
 * to the original and the entry in its role's table.
 */
#define REGISTRATION_TABLE(X) \
	X(register_buffers, "MooncakeKVManager", "register_buffer_to_engine", KVS_METHOD, "self", &manager_class) \
	X(deregister_buffers, "MooncakeKVManager", "deregister_buffer_to_engine", KVS_METHOD_IF_ANY, "self", NULL)

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

static KvsPyObject *manager_class, *register_info_class, *transfer_info_class, *sender_class, *receiver_class;

#define X(id, class_name, name, kind, parameters, class_p) \
	static KvsPyObject *original_##id; \
	static KvsPyObject *replace_##id(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs);
REGISTRATION_TABLE(X)
PREFILL_TABLE(X)
DECODE_TABLE(X)
#undef X

KVS_FORWARD(sender_init, sender_class, kvs_sender_init)
KVS_FORWARD(sender_abort, sender_class, kvs_sender_cancel)
KVS_FORWARD(sender_failure, sender_class, kvs_sender_cancel)
KVS_FORWARD(sender_clear, sender_class, kvs_sender_clear)
KVS_FORWARD(receiver_register, receiver_class, kvs_receiver_register)
KVS_FORWARD(receiver_metadata, receiver_class, kvs_receiver_metadata)
KVS_FORWARD(receiver_poll, receiver_class, kvs_receiver_poll)
KVS_FORWARD(receiver_abort, receiver_class, kvs_receiver_close)
KVS_FORWARD(receiver_failure, receiver_class, kvs_receiver_failure)
KVS_FORWARD(receiver_clear, receiver_class, kvs_receiver_close)

static KvsPyObject *replace_receiver_connect(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return kvs_sglang_connect(original_receiver_connect, self, args, kwargs);
}

/* ---- registration ---- */

static KvsPyObject *replace_register_buffers(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *result = kvs_replaced_call(KVS_CALL(register_buffers));
	if (result && kvs_py_is_exact(self, manager_class))
		kvs_sglang_register(self, 0);
	return result;
}

static KvsPyObject *replace_deregister_buffers(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	if (kvs_py_is_exact(self, manager_class))
		kvs_sglang_unregister(self);
	return kvs_replaced_call(KVS_CALL(deregister_buffers));
}

static KvsPyObject *replace_register_info(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return kvs_prefill_register_info(KVS_CALL(register_info), "msg", register_info_class);
}

static KvsPyObject *replace_transfer_info(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return kvs_prefill_transfer_info(KVS_CALL(transfer_info), "msg", transfer_info_class);
}

/* ---- sending ---- */

/* The KV calls name no room, but the destination rank and a slice of one room's list. */
static KvsPyObject *send_kv(const struct kvs_replaced *call)
{
	KvsPyObject *session = kvs_prefill_argument(call, "mooncake_session_id");
	struct kvs_send send = {
	        .manager = call->self,
	        .src_items = kvs_prefill_argument(call, "prefill_kv_indices"),
	        .dst_items = kvs_prefill_argument(call, "dst_kv_indices"),
	        .bare = &kvs_mooncake_bare,
	};
	if (kvs_py_is_exact(call->self, manager_class))
		send.info = kvs_prefill_peer(call->self, session);
	enum kvs_sent sent = kvs_prefill_send_kv(&send, session);
	kvs_py.Py_DecRef(send.request);
	kvs_py.Py_DecRef(send.info);
	return sent == KVS_SENT_STOCK ? kvs_replaced_call(call) : kvs_py.PyLong_FromLongLong(0);
}

static KvsPyObject *replace_send_kvcache(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return send_kv(KVS_CALL(send_kvcache));
}

static KvsPyObject *replace_send_kvcache_slice(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return send_kv(KVS_CALL(send_kvcache_slice));
}

/* Releases that slice the sliding-window pool by themselves have a method for it. */
static bool upstream_slices_state(KvsPyObject *manager, const char *type)
{
	KvsPyObject *method = strcmp(type, "swa") == 0 ? kvs_py_attr(manager, "_send_swa_state_slice") : NULL;
	kvs_py.Py_DecRef(method);
	return method != NULL;
}

static KvsPyObject *replace_maybe_send_extra(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	const struct kvs_replaced *call = KVS_CALL(maybe_send_extra);
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
	struct kvs_states states = {
	        .call = call,
	        .send = {.manager = self, .info = info, .request = request, .bare = &kvs_mooncake_bare},
	        .rest = kvs_py.PySequence_List(indices),
	        .dst_lists = kvs_py_attr(request, "dst_state_indices"),
	        .upstream = upstream_slices_state,
	};
	KvsPyObject *result = NULL;
	bool left = false;
	if (!states.rest || !states.dst_lists) {
		kvs_py.PyErr_Clear();
		result = kvs_replaced_call(call);
	} else if (kvs_prefill_states(&states, &left)) {
		result = left ? kvs_py.PyObject_CallFunctionObjArgs(call->original, self, request, states.rest,
		                                                    executor, info, NULL)
		              : kvs_py.PyLong_FromLongLong(0);
	}
	kvs_py.Py_DecRef(states.rest);
	kvs_py.Py_DecRef(states.dst_lists);
	return result;
}

static KvsPyObject *replace_send_aux(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *request = kvs_py_argument(args, kwargs, 0, "req");
	uint64_t room = 0;
	struct kvs_text text = {""};
	if (kvs_py_is_exact(self, manager_class) && request && kvs_splice_request_failed(self, request, &text)) {
		kvs_sglang_room(request, "room", &room);
		kvs_sglang_record_failure(self, room, text.s);
		return kvs_py.PyLong_FromLongLong(-1);
	}
	return kvs_replaced_call(KVS_CALL(send_aux));
}

/* ---- the tables ---- */

static int prepare(KvsPyObject *module)
{
	(void)module;
	return kvs_sglang_prepare();
}

static struct kvs_method registration_methods[] = {REGISTRATION_TABLE(KVS_METHOD_ROW)};
static struct kvs_method prefill_methods[] = {PREFILL_TABLE(KVS_METHOD_ROW)};
static struct kvs_method decode_methods[] = {DECODE_TABLE(KVS_METHOD_ROW)};

static struct kvs_connector_role roles[] = {
        KVS_ROLE("registration", registration_methods),
        KVS_ROLE("prefill", prefill_methods),
        KVS_ROLE("decode", decode_methods),
};

struct kvs_connector kvs_mooncake = {
        .name = "mooncake",
        .module = "sglang.srt.disaggregation.mooncake.conn",
        .prepare = prepare,
        .roles = roles,
        .role_count = sizeof roles / sizeof roles[0],
};
