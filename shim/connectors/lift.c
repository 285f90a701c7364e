/* SPDX-License-Identifier: Apache-2.0 */
#include "lift.h"

#include <string.h>
#include <time.h>

#include "../../transport/agreed.h"
#include "../../transport/clock.h"
#include "../../transport/log.h"

#define AGREE_NS      5000000000U /* how long after send_metadata a prefill may take to agree */
#define FIRST_WAIT_NS 100000000U  /* how long the first room of a prefill waits for it at once */

#define ATTRIBUTE_LIFTED "_kvsplice_lifted"       /* of a prefill's info: the release's text */
#define ATTRIBUTE_WAITED "_kvsplice_waited"       /* of a prefill's info: its first room has waited */
#define ATTRIBUTE_HELD   "_kvsplice_held"         /* of a receiver: the send_metadata call that is kept */
#define ATTRIBUTE_UNTIL  "_kvsplice_agreed_until" /* of a receiver: until when, ns */

/*
 * How the refusals begin that may be lifted, and the state types that they are about, which are ours. 0.5.22 and 0.5.23
 * (common/conn.py, try_ensure_parallel_info).
 */
#define REFUSAL_TABLE(X) \
	X("PD Disaggregation does NOT support different attention TP sizes with MXFP8 KV cache", "block_scale", \
	  "block_scale_swa") \
	X("MiniMax sparse PD requires matching attention TP sizes", "minimax_index_k", "")

static const struct refusal {
	const char *text;
	const char *types[2];
} refusals[] = {
#define X(text, first, second) {text, {first, second}},
        REFUSAL_TABLE(X)
#undef X
};
#define REFUSAL_COUNT (sizeof refusals / sizeof refusals[0])

static bool set(KvsPyObject *object, const char *attribute, KvsPyObject *value)
{
	bool ok = value && kvs_py.PyObject_SetAttrString(object, attribute, value) == 0;
	if (!ok)
		kvs_py.PyErr_Clear();
	return ok;
}

/* ---- the refusal ---- */

/* copy.copy(object), new; NULL with no exception left set. */
static KvsPyObject *shallow(KvsPyObject *object)
{
	KvsPyObject *module = kvs_py.PyImport_ImportModule("copy");
	KvsPyObject *function = kvs_py_attr(module, "copy");
	KvsPyObject *result = function && object ? kvs_py.PyObject_CallFunctionObjArgs(function, object, NULL) : NULL;
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(function);
	kvs_py.Py_DecRef(module);
	return result;
}

static bool is_hidden(KvsPyObject *type, unsigned int hidden)
{
	char name[KVS_NAME_SIZE];
	if (!kvs_py_attr_text(type, "value", name, sizeof name))
		return false;
	for (size_t i = 0; i < REFUSAL_COUNT; i++)
		if ((hidden >> i & 1) != 0 &&
		    (strcmp(name, refusals[i].types[0]) == 0 || strcmp(name, refusals[i].types[1]) == 0))
			return true;
	return false;
}

/* kv_args.state_types without the types of the lifted refusals, new; NULL with no exception left set. */
static KvsPyObject *types_shown(KvsPyObject *kv_args, unsigned int hidden)
{
	KvsPyObject *types = kvs_py_attr(kv_args, "state_types");
	KvsPyObject *list = types ? kvs_py.PySequence_List(types) : NULL;
	KvsPyObject *shown = list ? kvs_py.PyList_New(0) : NULL;
	for (ssize_t i = 0; shown && i < kvs_py.PyList_Size(list); i++) {
		KvsPyObject *type = kvs_py.PyList_GetItem(list, i);
		if (!is_hidden(type, hidden) && kvs_py.PyList_Append(shown, type) != 0) {
			kvs_py.Py_DecRef(shown);
			shown = NULL;
		}
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(list);
	kvs_py.Py_DecRef(types);
	return shown;
}

/*
 * The original, called with a copy of the manager that does not show the hidden types: the manager itself, which other
 * threads use, stays as it is, and what the method learns goes to a table that both share.
 */
static KvsPyObject *call_without(const struct kvs_replaced *call, unsigned int hidden)
{
	KvsPyObject *manager = shallow(call->self);
	KvsPyObject *original_args = kvs_py_attr(call->self, "kv_args");
	KvsPyObject *kv_args = shallow(original_args);
	KvsPyObject *types = kv_args ? types_shown(kv_args, hidden) : NULL;
	KvsPyObject *result = NULL;
	if (manager && set(kv_args, "state_types", types) && set(manager, "kv_args", kv_args))
		result = kvs_py_call_original(call->original, manager, call->args, call->kwargs);
	else
		kvs_sglang_raise("kvsplice: the manager cannot be copied");
	kvs_py.Py_DecRef(types);
	kvs_py.Py_DecRef(kv_args);
	kvs_py.Py_DecRef(original_args);
	kvs_py.Py_DecRef(manager);
	return result;
}

/* Which refusal this exception is; REFUSAL_COUNT: another one. Its text goes to text_p. */
static size_t which(KvsPyObject *exception, char *text_p, size_t size)
{
	KvsPyObject *string = exception ? kvs_py.PyObject_Str(exception) : NULL;
	size_t i = REFUSAL_COUNT;
	if (string && kvs_py_text(string, text_p, size))
		for (i = 0; i < REFUSAL_COUNT; i++)
			if (strncmp(text_p, refusals[i].text, strlen(refusals[i].text)) == 0)
				break;
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(string);
	return i;
}

/* The info that the call has put into the manager's table gets the text; else it is taken out again. */
static bool mark(const struct kvs_replaced *call, const char *text)
{
	KvsPyObject *address = kvs_py_argument(call->args, call->kwargs, 0, "bootstrap_addr");
	KvsPyObject *table = kvs_py_attr(call->self, "prefill_info_table");
	KvsPyObject *info = table && address ? kvs_py.PyObject_GetItem(table, address) : NULL;
	KvsPyObject *string = kvs_py.PyUnicode_FromString(text);
	kvs_py.PyErr_Clear();
	bool ok = info && set(info, ATTRIBUTE_LIFTED, string);
	if (!ok && info) {
		KvsPyObject *pop = kvs_py_attr(table, "pop");
		KvsPyObject *popped = pop ? kvs_py.PyObject_CallFunctionObjArgs(pop, address, NULL) : NULL;
		kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(popped);
		kvs_py.Py_DecRef(pop);
	}
	kvs_py.Py_DecRef(string);
	kvs_py.Py_DecRef(info);
	kvs_py.Py_DecRef(table);
	return ok;
}

/* True: there is a result. */
static bool is_true(KvsPyObject *result)
{
	int yes = kvs_py.PyObject_IsTrue(result);
	kvs_py.PyErr_Clear();
	return yes == 1;
}

KvsPyObject *kvs_lift_ensure_info(const struct kvs_replaced *call)
{
	KvsPyObject *result = kvs_replaced_call(call);
	KvsPyObject *type = NULL, *value = NULL, *traceback = NULL;
	char text[KVS_TEXT_SIZE] = "", next[KVS_TEXT_SIZE];
	unsigned int hidden = 0;
	if (result)
		return result;
	kvs_py.PyErr_Fetch(&type, &value, &traceback);
	struct kvs_manager *m = kvs_sglang_manager(call->self);
	/* The first refusal is the one that is told; a model may meet several. */
	size_t refusal = m && m->role == KVS_ROLE_DECODE ? which(value, text, sizeof text) : REFUSAL_COUNT;
	while (refusal < REFUSAL_COUNT && (hidden >> refusal & 1) == 0) {
		KvsPyObject *other_type = NULL, *other_value = NULL, *other_traceback = NULL;
		hidden |= 1U << refusal;
		result = call_without(call, hidden);
		if (result)
			break;
		kvs_py.PyErr_Fetch(&other_type, &other_value, &other_traceback);
		refusal = which(other_value, next, sizeof next);
		kvs_py.Py_DecRef(other_type);
		kvs_py.Py_DecRef(other_value);
		kvs_py.Py_DecRef(other_traceback);
	}
	if (result && is_true(result) && !mark(call, text)) {
		kvs_py.Py_DecRef(result);
		result = NULL;
	}
	if (!result) {
		kvs_py.PyErr_Restore(type, value, traceback);
		return NULL;
	}
	kvs_log(KVS_LOG_INFO, "lifted until the prefill agrees: %s", text);
	kvs_py.Py_DecRef(type);
	kvs_py.Py_DecRef(value);
	kvs_py.Py_DecRef(traceback);
	return result;
}

/* ---- its rooms ---- */

bool kvs_lift_text(KvsPyObject *receiver, char *text_p, size_t size)
{
	KvsPyObject *info = kvs_py_attr(receiver, "prefill_info");
	bool lifted = info && kvs_py_attr_text(info, ATTRIBUTE_LIFTED, text_p, size);
	kvs_py.Py_DecRef(info);
	return lifted;
}

static bool has_agreed(KvsPyObject *receiver)
{
	int64_t tp_size = 0;
	KvsPyObject *manager = kvs_py_attr(receiver, "kv_mgr");
	KvsPyObject *info = kvs_py_attr(receiver, "prefill_info");
	struct kvs_manager *m = manager ? kvs_sglang_manager(manager) : NULL;
	bool agreed = m && info && kvs_py_attr_i64(info, "attn_tp_size", &tp_size) && tp_size > 0 &&
	              tp_size <= INT32_MAX && kvs_endpoint_agreed(m->endpoint, (uint32_t)tp_size);
	kvs_py.Py_DecRef(info);
	kvs_py.Py_DecRef(manager);
	return agreed;
}

/* A prefill's first room comes right behind the registration that its agents answer. */
static bool agrees_soon(KvsPyObject *receiver)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	KvsPyObject *info = kvs_py_attr(receiver, "prefill_info");
	bool agreed = has_agreed(receiver);
	if (!agreed && info && !kvs_py_attr_true(info, ATTRIBUTE_WAITED)) {
		KvsPyObject *yes = kvs_py.PyLong_FromLongLong(1);
		set(info, ATTRIBUTE_WAITED, yes);
		kvs_py.Py_DecRef(yes);
		for (uint64_t end = kvs_now_ns() + FIRST_WAIT_NS; !agreed && kvs_now_ns() < end;
		     agreed = has_agreed(receiver)) {
			void *state = kvs_py.PyEval_SaveThread();
			nanosleep(&pause, NULL);
			kvs_py.PyEval_RestoreThread(state);
		}
	}
	kvs_py.Py_DecRef(info);
	return agreed;
}

/* Keep the call in the receiver. */
static bool hold(const struct kvs_replaced *call)
{
	KvsPyObject *parts[] = {call->original, call->args, call->kwargs ? call->kwargs : kvs_py.none};
	KvsPyObject *held = kvs_py.PyTuple_New(3);
	KvsPyObject *until = kvs_py.PyLong_FromUnsignedLongLong(kvs_now_ns() + AGREE_NS);
	for (ssize_t i = 0; held && i < 3; i++) {
		kvs_py.Py_IncRef(parts[i]);
		kvs_py.PyTuple_SetItem(held, i, parts[i]);
	}
	bool ok = set(call->self, ATTRIBUTE_UNTIL, until) && set(call->self, ATTRIBUTE_HELD, held);
	kvs_py.Py_DecRef(until);
	kvs_py.Py_DecRef(held);
	return ok;
}

enum kvs_lift kvs_lift_metadata(const struct kvs_replaced *call)
{
	char text[KVS_TEXT_SIZE];
	if (!kvs_lift_text(call->self, text, sizeof text) || agrees_soon(call->self))
		return KVS_LIFT_AGREED;
	return hold(call) ? KVS_LIFT_HELD : KVS_LIFT_OVER;
}

void kvs_lift_drop(KvsPyObject *receiver)
{
	KvsPyObject *held = kvs_py_attr(receiver, ATTRIBUTE_HELD);
	if (held && held != kvs_py.none)
		set(receiver, ATTRIBUTE_HELD, kvs_py.none);
	kvs_py.Py_DecRef(held);
}

enum kvs_lift kvs_lift_poll(KvsPyObject *receiver, KvsPyObject **held_p)
{
	uint64_t until = 0;
	*held_p = NULL;
	KvsPyObject *held = kvs_py_attr(receiver, ATTRIBUTE_HELD);
	if (!held || held == kvs_py.none) {
		kvs_py.Py_DecRef(held);
		return KVS_LIFT_AGREED;
	}
	if (has_agreed(receiver)) {
		*held_p = held;
		kvs_lift_drop(receiver);
		return KVS_LIFT_AGREED;
	}
	kvs_py.Py_DecRef(held);
	if (kvs_py_attr_u64(receiver, ATTRIBUTE_UNTIL, &until) && kvs_now_ns() < until)
		return KVS_LIFT_HELD;
	kvs_lift_drop(receiver);
	return KVS_LIFT_OVER;
}
