/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SGLang's nixl connector (sglang/srt/disaggregation/nixl/conn.py), both roles.
 *
 * Its transfer worker catches what is raised for one room and fails that room: so a failure of ours is raised, where it
 * happens and again by a send_aux that comes after it. From 0.5.20 on the decode is told by the connector itself,
 * before by our agent alone: a decode without the library can then only time out.
 *
 * Up to 0.5.22 the decode counts notifications that ride on the writes, so each call that we stand for sends its own
 * when the bytes are in place. From 0.5.23 on there are none, and the state call is a generator of handles.
 */
#include <stdio.h>
#include <string.h>

#include "../../transport/log.h"
#include "bare.h"
#include "methods.h"
#include "prefill.h"

/* As mooncake.c has them: id, class, method, kind, parameters, where the class is kept. */
#define REGISTRATION_TABLE(X) \
	X(register_buffers, "NixlKVManager", "register_buffer_to_engine", KVS_METHOD, "self", &manager_class)

#define PREFILL_TABLE(X) \
	X(register_info, "KVArgsRegisterInfo", "from_zmq", KVS_CLASSMETHOD, "cls msg", &register_info_class) \
	X(transfer_info, "TransferInfo", "from_zmq", KVS_CLASSMETHOD, "cls msg", &transfer_info_class) \
	X(prepare_payload, "NixlKVManager", "_prepare_payload_xfer", KVS_METHOD_IF_ANY, "self peer_info", NULL) \
	X(send_kvcache, "NixlKVManager", "send_kvcache", KVS_METHOD, \
	  "self peer_name prefill_kv_indices dst_kv_ptrs dst_kv_indices dst_gpu_id notif|" \
	  "self peer_name prefill_kv_indices dst_kv_ptrs dst_kv_indices dst_gpu_id", \
	  NULL) \
	X(send_kvcache_slice, "NixlKVManager", "send_kvcache_slice", KVS_METHOD, \
	  "self peer_name prefill_kv_indices dst_kv_ptrs dst_kv_indices dst_gpu_id notif prefill_tp_size " \
	  "decode_tp_size decode_tp_rank dst_kv_item_len|" \
	  "self peer_name prefill_kv_indices dst_kv_indices notif|" \
	  "self peer_name prefill_kv_indices dst_kv_indices", \
	  NULL) \
	X(maybe_send_extra, "NixlKVManager", "maybe_send_extra", KVS_METHOD, \
	  "self peer_name prefill_state_indices dst_state_data_ptrs dst_state_indices dst_gpu_id notif " \
	  "decode_tp_size|" \
	  "self peer_name prefill_state_indices dst_state_data_ptrs dst_state_indices dst_gpu_id decode_tp_size", \
	  NULL) \
	X(send_aux, "NixlKVManager", "send_aux", KVS_METHOD, \
	  "self peer_name prefill_aux_index dst_aux_ptrs dst_aux_index notif|" \
	  "self peer_name prefill_aux_index dst_aux_ptrs dst_aux_index", \
	  NULL) \
	KVS_SENDER_TABLE(X, "Nixl")

#define DECODE_TABLE(X) KVS_RECEIVER_TABLE(X, "Nixl")

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

/* manager.name exists. */
static bool has(KvsPyObject *manager, const char *name)
{
	KvsPyObject *attribute = kvs_py_attr(manager, name);
	kvs_py.Py_DecRef(attribute);
	return attribute != NULL;
}

/* agent.check_xfer_state(handle) for a handle of None, which a call of ours returned; self is the agent's own method.
 */
static KvsPyObject *check_state(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	if (kvs_py.PyTuple_Size(args) == 1 && kvs_py.PyTuple_GetItem(args, 0) == kvs_py.none)
		return kvs_py.PyUnicode_FromString("DONE");
	return kvs_py.PyObject_Call(self, args, kwargs);
}

static struct kvs_py_method_def check_state_def = {
        .name = "check_xfer_state",
        .function = check_state,
        .flags = KVS_PY_METH_VARARGS | KVS_PY_METH_KEYWORDS,
};

/*
 * Up to 0.5.14 the worker asks the agent after every handle that a KV call returned, None as well; the release that
 * skips None is the one that brought send_kvcache_mixed.
 */
static void accept_no_handle(KvsPyObject *manager)
{
	if (has(manager, "send_kvcache_mixed"))
		return;
	KvsPyObject *agent = kvs_py_attr(manager, "agent");
	KvsPyObject *method = agent ? kvs_py_attr(agent, "check_xfer_state") : NULL;
	KvsPyObject *function = method ? kvs_py.PyCFunction_NewEx(&check_state_def, method, NULL) : NULL;
	if (!function || kvs_py.PyObject_SetAttrString(agent, "check_xfer_state", function) != 0) {
		kvs_py.PyErr_Clear();
		kvs_log(KVS_LOG_WARN, "nixl's agent takes no attribute: this server stays on the connector's own path");
		kvs_sglang_unregister(manager);
	}
	kvs_py.Py_DecRef(function);
	kvs_py.Py_DecRef(method);
	kvs_py.Py_DecRef(agent);
}

static KvsPyObject *replace_register_buffers(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *result = kvs_replaced_call(KVS_CALL(register_buffers));
	if (!result || !kvs_py_is_exact(self, manager_class))
		return result;
	/* State goes with K's length for V in every release, the KV pool where it has no descriptor list prepared. */
	kvs_sglang_register(self, KVS_UNEVEN_STATE | (has(self, "_prepare_payload_xfer") ? 0 : KVS_UNEVEN_KV));
	accept_no_handle(self);
	return result;
}

static KvsPyObject *replace_register_info(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return kvs_prefill_register_info(KVS_CALL(register_info), "msg", register_info_class);
}

static KvsPyObject *replace_transfer_info(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return kvs_prefill_transfer_info(KVS_CALL(transfer_info), "msg", transfer_info_class);
}

static KvsPyObject *none(void)
{
	kvs_py.Py_IncRef(kvs_py.none);
	return kvs_py.none;
}

/*
 * Prepares nixl's descriptor lists for a decode rank, on the bootstrap thread, which anything raised here would end: at
 * different TP one descriptor for each token of the pool, with the first peer's slices kept for all later ones. Nothing
 * of it is used for KV that is ours, so a decode with the library does without, and for one without it an error is no
 * reason to stop.
 */
static KvsPyObject *replace_prepare_payload(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	const struct kvs_replaced *call = KVS_CALL(prepare_payload);
	KvsPyObject *info = kvs_prefill_argument(call, "peer_info");
	if (!kvs_py_is_exact(self, manager_class) || !info || kvs_py_attr_true(info, "requires_dcp_relayout") ||
	    !kvs_splice_tp_differs(self, info) || !kvs_prefill_kv_is_ours(self, info))
		return kvs_replaced_call(call);
	if (kvs_splice_is_preloaded(info))
		return none();
	KvsPyObject *result = kvs_replaced_call(call);
	if (result)
		return result;
	kvs_log(KVS_LOG_INFO, "nixl cannot prepare its own sliced path for a decode rank; it is not needed");
	kvs_py.PyErr_Clear();
	return none();
}

/* ---- sending ---- */

/* manager.agent.send_notif(peer, notif + suffix), where the call has a notif; false with the exception set. */
static bool notify(const struct kvs_replaced *call, const char *suffix)
{
	char text[256];
	KvsPyObject *notif = kvs_prefill_argument(call, "notif");
	if (!notif)
		return true;
	if (!kvs_py_text(notif, text, sizeof text)) {
		kvs_sglang_raise("kvsplice: a notification that is no text");
		return false;
	}
	size_t used = strlen(text);
	snprintf(text + used, sizeof text - used, "%s", suffix);
	KvsPyObject *agent = kvs_py_attr(call->self, "agent");
	KvsPyObject *method = agent ? kvs_py.PyObject_GetAttrString(agent, "send_notif") : NULL;
	KvsPyObject *bytes = method ? kvs_py.PyBytes_FromStringAndSize(text, (ssize_t)strlen(text)) : NULL;
	KvsPyObject *result = bytes ? kvs_py.PyObject_CallFunctionObjArgs(
	                                      method, kvs_prefill_argument(call, "peer_name"), bytes, NULL)
	                            : NULL;
	kvs_py.Py_DecRef(result);
	kvs_py.Py_DecRef(bytes);
	kvs_py.Py_DecRef(method);
	kvs_py.Py_DecRef(agent);
	return result != NULL;
}

static KvsPyObject *send_kv(const struct kvs_replaced *call)
{
	KvsPyObject *peer = kvs_prefill_argument(call, "peer_name");
	struct kvs_send send = {
	        .manager = call->self,
	        .src_items = kvs_prefill_argument(call, "prefill_kv_indices"),
	        .dst_items = kvs_prefill_argument(call, "dst_kv_indices"),
	        .bare = &kvs_nixl_bare,
	};
	if (kvs_py_is_exact(call->self, manager_class))
		send.info = kvs_prefill_peer(call->self, peer);
	KvsPyObject *result = NULL;
	switch (kvs_prefill_send_kv(&send, peer)) {
	case KVS_SENT_STOCK:
		result = kvs_replaced_call(call);
		break;
	case KVS_SENT_DONE:
		result = notify(call, "") ? none() : NULL;
		break;
	case KVS_SENT_FAILED:
		kvs_prefill_raise(call->self, send.request);
		break;
	}
	kvs_py.Py_DecRef(send.request);
	kvs_py.Py_DecRef(send.info);
	return result;
}

static KvsPyObject *replace_send_kvcache(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return send_kv(KVS_CALL(send_kvcache));
}

static KvsPyObject *replace_send_kvcache_slice(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return send_kv(KVS_CALL(send_kvcache_slice));
}

/* Releases that slice the sliding-window pool by themselves have a method for it, which has one length per buffer. */
static bool upstream_slices_state(KvsPyObject *manager, const char *type)
{
	return strcmp(type, "swa") == 0 && has(manager, "_send_swa_state_slice");
}

static bool state_done(const struct kvs_replaced *call, uint32_t index)
{
	char suffix[16];
	snprintf(suffix, sizeof suffix, "_%u", index);
	return notify(call, suffix);
}

/* The original, with rest for its second argument. */
static KvsPyObject *send_rest(const struct kvs_replaced *call, KvsPyObject *rest)
{
	KvsPyObject *list = kvs_py.PySequence_List(call->args);
	KvsPyObject *args = NULL;
	if (list) {
		kvs_py.Py_IncRef(rest);
		kvs_py.PyList_SetItem(list, 1, rest);
		args = kvs_py.PySequence_Tuple(list);
	}
	KvsPyObject *result = args ? kvs_py_call_original(call->original, call->self, args, call->kwargs) : NULL;
	kvs_py.Py_DecRef(args);
	kvs_py.Py_DecRef(list);
	return result;
}

/* No handles: a list where the original returns one, an iterator where it is a generator. */
static KvsPyObject *no_handles(const struct kvs_replaced *call)
{
	KvsPyObject *list = kvs_py.PyList_New(0);
	if (!list || kvs_prefill_argument(call, "notif"))
		return list;
	KvsPyObject *method = kvs_py.PyObject_GetAttrString(list, "__iter__");
	KvsPyObject *iterator = method ? kvs_py.PyObject_CallObject(method, NULL) : NULL;
	kvs_py.Py_DecRef(method);
	kvs_py.Py_DecRef(list);
	return iterator;
}

static KvsPyObject *send_states(const struct kvs_replaced *call, KvsPyObject *info, KvsPyObject *request)
{
	struct kvs_states states = {
	        .call = call,
	        .send = {.manager = call->self, .info = info, .request = request, .bare = &kvs_nixl_bare},
	        .rest = kvs_py.PySequence_List(kvs_prefill_argument(call, "prefill_state_indices")),
	        .dst_lists = kvs_prefill_argument(call, "dst_state_indices"),
	        .slices = upstream_slices_state,
	        .done = state_done,
	};
	KvsPyObject *result = NULL;
	bool left = false;
	if (!states.rest || !kvs_prefill_states(&states, &left)) {
		kvs_py.Py_DecRef(states.rest);
		return NULL;
	}
	if (kvs_prefill_failed(call->self, request))
		kvs_prefill_raise(call->self, request);
	else
		result = left ? send_rest(call, states.rest) : no_handles(call);
	kvs_py.Py_DecRef(states.rest);
	return result;
}

static KvsPyObject *replace_maybe_send_extra(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	const struct kvs_replaced *call = KVS_CALL(maybe_send_extra);
	KvsPyObject *peer = kvs_prefill_argument(call, "peer_name");
	KvsPyObject *dst_lists = kvs_prefill_argument(call, "dst_state_indices");
	KvsPyObject *info = NULL, *request = NULL;
	if (kvs_py_is_exact(self, manager_class) && dst_lists && kvs_py.PyTuple_Size(args) > 1)
		info = kvs_prefill_peer(self, peer);
	if (info && !kvs_sglang_manager(self))
		kvs_splice_observe(self, info);
	else if (info)
		request = kvs_prefill_request(self, peer, "dst_state_indices", dst_lists);
	KvsPyObject *result = request ? send_states(call, info, request) : kvs_replaced_call(call);
	kvs_py.Py_DecRef(request);
	kvs_py.Py_DecRef(info);
	return result;
}

/* The room of an aux call is the newest one of its decode rank with this metadata row. */
static KvsPyObject *replace_send_aux(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	const struct kvs_replaced *call = KVS_CALL(send_aux);
	KvsPyObject *row = kvs_prefill_argument(call, "dst_aux_index");
	KvsPyObject *request = NULL;
	if (kvs_py_is_exact(self, manager_class) && kvs_sglang_manager(self) && row) {
		long long number = kvs_py.PyLong_AsLongLong(row);
		if (!kvs_py.PyErr_Occurred())
			request = kvs_prefill_request_numbered(self, kvs_prefill_argument(call, "peer_name"),
			                                       "dst_aux_index", number);
		kvs_py.PyErr_Clear();
	}
	KvsPyObject *result = NULL;
	if (request && kvs_prefill_failed(self, request))
		kvs_prefill_raise(self, request);
	else
		result = kvs_replaced_call(call);
	kvs_py.Py_DecRef(request);
	return result;
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

struct kvs_connector kvs_nixl = {
        .name = "nixl",
        .module = "sglang.srt.disaggregation.nixl.conn",
        .prepare = prepare,
        .roles = roles,
        .role_count = sizeof roles / sizeof roles[0],
};
