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
#include "methods.h"
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
	X(poison_room, "MooncakeKVManager", "poison_deferred_ack_room", KVS_METHOD_IF_ANY, "self room", NULL) \
	X(validate_layout, "MooncakeKVManager", "_validate_peer_state_layout", KVS_METHOD_IF_ANY, \
	  "self registration_info", NULL) \
	KVS_SENDER_TABLE(X, "Mooncake")

#define DECODE_TABLE(X) KVS_RECEIVER_TABLE(X, "Mooncake")

static KvsPyObject *manager_class, *register_info_class, *transfer_info_class, *sender_class, *receiver_class;

#define X(id, class_name, name, kind, parameters, class_p) \
	static KvsPyObject *original_##id; \
	static KvsPyObject *replace_##id(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs);
REGISTRATION_TABLE(X)
PREFILL_TABLE(X)
DECODE_TABLE(X)
#undef X

KVS_COMMON_METHODS

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

/*
 * Releases from 0.5.22 on compare a decode rank's state lengths at its registration, on the bootstrap thread, and fail
 * all of its rooms when they differ, as heads do at different TP where the pools have layer ids. Between two libraries
 * that is the agents' matter; what is not ours is checked again when it is sent, since the result is not "checked".
 */
static KvsPyObject *replace_validate_layout(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	const struct kvs_replaced *call = KVS_CALL(validate_layout);
	KvsPyObject *result = kvs_replaced_call(call);
	KvsPyObject *info = kvs_prefill_argument(call, "registration_info");
	if (!result || !info || !kvs_py_is_exact(self, manager_class) || !kvs_sglang_manager(self) ||
	    !kvs_splice_is_preloaded(info) || !kvs_splice_tp_differs(self, info))
		return result;
	KvsPyObject *reason = kvs_py.PySequence_GetItem(result, 1);
	KvsPyObject *unchecked = NULL;
	if (reason && reason != kvs_py.none) {
		KvsPyObject *no = kvs_py.PyLong_FromLongLong(0);
		unchecked = no ? kvs_py.PyTuple_New(2) : NULL;
		if (unchecked) {
			kvs_py.PyTuple_SetItem(unchecked, 0, no);
			kvs_py.Py_IncRef(kvs_py.none);
			kvs_py.PyTuple_SetItem(unchecked, 1, kvs_py.none);
		}
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(reason);
	if (!unchecked)
		return result;
	kvs_py.Py_DecRef(result);
	return unchecked;
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

/* QSA state, which is whole on every rank, in every release that has it. */
static bool upstream_copies_state(KvsPyObject *manager, const char *type)
{
	(void)manager;
	return strncmp(type, "qsa_", strlen("qsa_")) == 0;
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
	        .slices = upstream_slices_state,
	        .copies = upstream_copies_state,
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

/*
 * After a failed send_aux the connector never tells the decode that this room's pages are idle (releases that defer
 * their release until then), because a batch of its engine may still be running: the decode would hold them for half a
 * minute. Of ours nothing runs any more once a call of ours has returned, so the room that we failed in this thread
 * just now stays as it was. What the engine itself left unsettled has been noted before.
 */
static __thread bool settled;
static __thread uint64_t settled_room;

static void note_settled(KvsPyObject *manager, KvsPyObject *request, uint64_t room)
{
	KvsPyObject *session = kvs_py_attr(request, "mooncake_session_id");
	KvsPyObject *info = session ? kvs_prefill_peer(manager, session) : NULL;
	settled = info && kvs_splice_is_preloaded(info);
	settled_room = room;
	kvs_py.Py_DecRef(info);
	kvs_py.Py_DecRef(session);
}

static KvsPyObject *replace_poison_room(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *number = kvs_py_argument(args, kwargs, 0, "room");
	bool ours = settled && kvs_py_is_exact(self, manager_class) && number &&
	            kvs_py.PyLong_AsUnsignedLongLong(number) == settled_room && !kvs_py.PyErr_Occurred();
	kvs_py.PyErr_Clear();
	settled = false;
	if (!ours)
		return kvs_replaced_call(KVS_CALL(poison_room));
	kvs_py.Py_IncRef(kvs_py.none);
	return kvs_py.none;
}

static KvsPyObject *replace_send_aux(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *request = kvs_py_argument(args, kwargs, 0, "req");
	uint64_t room = 0;
	struct kvs_text text = {""};
	settled = false;
	if (kvs_py_is_exact(self, manager_class) && request && kvs_splice_request_failed(self, request, &text)) {
		kvs_sglang_room(request, "room", &room);
		kvs_sglang_record_failure(self, room, text.s);
		note_settled(self, request, room);
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
