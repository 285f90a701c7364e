/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SGLang's mori connector (sglang/srt/disaggregation/mori/conn.py), both roles.
 *
 * What is raised while a chunk is sent fails its room, on both sides and with the text: so a failure of ours is raised.
 * Its calls return lists of transfer statuses, for the worker to wait for: what we moved is in place, and has none. Up
 * to 0.5.12 there is no worker and the scheduler's thread sends: there a call returns at once, with a status of ours.
 * (That release takes no model with a second pool: its mori looks for kv_args.state_type, which it does not have.) The
 * connector knows its peers' memory by descriptors and offsets; the addresses that our agent needs are the agent's own.
 *
 * At equal TP it sends all KV buffers with the first one's length, and at different TP it refuses the sliding-window
 * pool alone: any other state goes unsliced, whatever it is. So nothing but mamba is left to it there.
 */
#include "methods.h"
#include "prefill.h"

/* As mooncake.c has them: id, class, method, kind, parameters, where the class is kept. */
#define REGISTRATION_TABLE(X) \
	X(register_buffers, "MoriKVManager", "_register_local_buffers", KVS_METHOD, "self", &manager_class) \
	X(teardown, "MoriKVManager", "teardown", KVS_METHOD_IF_ANY, "self", NULL)

#define PREFILL_TABLE(X) \
	X(register_info, "KVArgsRegisterInfo", "from_zmq", KVS_CLASSMETHOD, "cls payload", &register_info_class) \
	X(transfer_info, "TransferInfo", "from_zmq", KVS_CLASSMETHOD, "cls payload", &transfer_info_class) \
	X(send_kvcache, "MoriKVManager", "send_kvcache", KVS_METHOD, \
	  "self peer_info prefill_kv_indices dst_kv_indices", NULL) \
	X(send_state, "MoriKVManager", "send_state", KVS_METHOD, "self peer_info src_state_indices dst_state_indices", \
	  NULL) \
	X(send_aux, "MoriKVManager", "send_aux", KVS_METHOD, "self peer_info prefill_aux_index dst_aux_index room", \
	  NULL) \
	KVS_SENDER_TABLE(X, "Mori")

#define DECODE_TABLE(X) KVS_RECEIVER_TABLE(X, "Mori")

static bool sends_from_worker;
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
		kvs_sglang_register(self, KVS_UNEVEN_KV);
	return result;
}

static KvsPyObject *replace_teardown(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	if (kvs_py_is_exact(self, manager_class))
		kvs_sglang_unregister(self);
	return kvs_replaced_call(KVS_CALL(teardown));
}

static KvsPyObject *replace_register_info(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return kvs_prefill_register_info(KVS_CALL(register_info), "payload", register_info_class);
}

static KvsPyObject *replace_transfer_info(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	return kvs_prefill_transfer_info(KVS_CALL(transfer_info), "payload", transfer_info_class);
}

/* ---- sending ---- */

static KvsPyObject *replace_send_kvcache(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	const struct kvs_replaced *call = KVS_CALL(send_kvcache);
	struct kvs_send send = {
	        .manager = self,
	        .src_items = kvs_prefill_argument(call, "prefill_kv_indices"),
	        .dst_items = kvs_prefill_argument(call, "dst_kv_indices"),
	};
	if (kvs_py_is_exact(self, manager_class))
		send.info = kvs_prefill_argument(call, "peer_info");
	KvsPyObject *key = kvs_py_attr(send.info, "engine_key");
	KvsPyObject *result = NULL, *status = NULL;
	if (!sends_from_worker)
		send.status_p = &status;
	switch (kvs_prefill_send_kv(&send, key)) {
	case KVS_SENT_STOCK:
		result = kvs_replaced_call(call);
		break;
	case KVS_SENT_DONE:
		result = kvs_py.PyList_New(0);
		if (result && status && kvs_py.PyList_Append(result, status) != 0) {
			kvs_py.Py_DecRef(result);
			result = NULL;
		}
		break;
	case KVS_SENT_FAILED:
		kvs_prefill_raise(self, send.request);
		break;
	}
	kvs_py.Py_DecRef(status);
	kvs_py.Py_DecRef(key);
	kvs_py.Py_DecRef(send.request);
	return result;
}

/* No release slices any of what is ours. */
static bool upstream_slices_state(KvsPyObject *manager, const char *type)
{
	(void)manager;
	(void)type;
	return false;
}

static KvsPyObject *send_states(const struct kvs_replaced *call, KvsPyObject *info, KvsPyObject *request)
{
	struct kvs_states states = {
	        .call = call,
	        .send = {.manager = call->self, .info = info, .request = request},
	        .rest = kvs_py.PySequence_List(kvs_prefill_argument(call, "src_state_indices")),
	        .dst_lists = kvs_prefill_argument(call, "dst_state_indices"),
	        .slices = upstream_slices_state,
	};
	KvsPyObject *result = NULL;
	bool left = false;
	if (states.rest && kvs_prefill_states(&states, &left)) {
		if (kvs_prefill_failed(call->self, request))
			kvs_prefill_raise(call->self, request);
		else
			result = left ? kvs_py.PyObject_CallFunctionObjArgs(call->original, call->self, info,
			                                                    states.rest, states.dst_lists, NULL)
			              : kvs_py.PyList_New(0);
	}
	kvs_py.Py_DecRef(states.rest);
	return result;
}

static KvsPyObject *replace_send_state(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	const struct kvs_replaced *call = KVS_CALL(send_state);
	KvsPyObject *info = kvs_prefill_argument(call, "peer_info");
	KvsPyObject *src_lists = kvs_prefill_argument(call, "src_state_indices");
	KvsPyObject *dst_lists = kvs_prefill_argument(call, "dst_state_indices");
	KvsPyObject *request = NULL;
	if (sends_from_worker && kvs_py_is_exact(self, manager_class) && info && src_lists && dst_lists) {
		KvsPyObject *key = kvs_py_attr(info, "engine_key");
		if (!kvs_sglang_manager(self))
			kvs_splice_observe(self, info);
		else
			request = kvs_prefill_request(self, key, "dst_state_indices", dst_lists);
		kvs_py.Py_DecRef(key);
	}
	KvsPyObject *result = request ? send_states(call, info, request) : kvs_replaced_call(call);
	kvs_py.Py_DecRef(request);
	return result;
}

static KvsPyObject *replace_send_aux(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	const struct kvs_replaced *call = KVS_CALL(send_aux);
	KvsPyObject *number = kvs_prefill_argument(call, "room");
	KvsPyObject *request = NULL;
	if (kvs_py_is_exact(self, manager_class) && number) {
		KvsPyObject *key = kvs_py_attr(kvs_prefill_argument(call, "peer_info"), "engine_key");
		long long room = kvs_py.PyLong_AsLongLong(number);
		if (!kvs_py.PyErr_Occurred())
			request = kvs_prefill_request_numbered(self, key, "room", room);
		kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(key);
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
	KvsPyObject *class_object = kvs_py_attr(module, "MoriKVManager");
	KvsPyObject *worker = kvs_py_attr(class_object, "_transfer_worker");
	sends_from_worker = worker != NULL;
	kvs_py.Py_DecRef(worker);
	kvs_py.Py_DecRef(class_object);
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

struct kvs_connector kvs_mori = {
        .name = "mori",
        .module = "sglang.srt.disaggregation.mori.conn",
        .prepare = prepare,
        .roles = roles,
        .role_count = sizeof roles / sizeof roles[0],
};
