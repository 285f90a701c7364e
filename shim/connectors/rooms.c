/* SPDX-License-Identifier: Apache-2.0 */
#include "rooms.h"

#include <stdlib.h>

#include "../../policy/state.h"
#include "../../transport/clock.h"
#include "../../transport/log.h"
#include "../options.h"
#include "cleared.h"
#include "lift.h"

#define REASON_NS 50000000U /* how much later than the connector's message our agent's may come */

#define ATTRIBUTE_FAILED_AT "_kvsplice_failed_at" /* of a receiver whose connector reported failure: when, ns */
#define ATTRIBUTE_REASON    "_kvsplice_reason"    /* of a receiver whose failure we have a text for */
#define ATTRIBUTE_ROOM      "_kvsplice_room"      /* of a receiver whose room is open at our agent */

KvsPyObject *kvs_replaced_call(const struct kvs_replaced *call)
{
	return kvs_py_call_original(call->original, call->self, call->args, call->kwargs);
}

/* The endpoint and room number behind a sender or receiver; false: not ours. */
static bool room_of(KvsPyObject *object, uint64_t *endpoint_p, uint64_t *room_p)
{
	KvsPyObject *manager = kvs_py_attr(object, "kv_mgr");
	struct kvs_manager *m = manager ? kvs_sglang_manager(manager) : NULL;
	if (m)
		*endpoint_p = m->endpoint;
	kvs_py.Py_DecRef(manager);
	return m && kvs_sglang_room(object, "bootstrap_room", room_p);
}

/* ---- sender ---- */

KvsPyObject *kvs_sender_init(const struct kvs_replaced *call)
{
	KvsPyObject *manager = kvs_py_argument(call->args, call->kwargs, 0, "mgr");
	KvsPyObject *number = kvs_py_argument(call->args, call->kwargs, 2, "bootstrap_room");
	struct kvs_manager *m = manager ? kvs_sglang_manager(manager) : NULL;
	if (m && number) {
		long long room = kvs_py.PyLong_AsLongLong(number);
		if (!kvs_py.PyErr_Occurred())
			kvs_source_forget(m->endpoint, (uint64_t)room);
		kvs_py.PyErr_Clear();
	}
	return kvs_replaced_call(call);
}

KvsPyObject *kvs_sender_cancel(const struct kvs_replaced *call)
{
	uint64_t endpoint, room;
	if (room_of(call->self, &endpoint, &room))
		kvs_source_cancel(endpoint, room);
	return kvs_replaced_call(call);
}

KvsPyObject *kvs_sender_clear(const struct kvs_replaced *call)
{
	uint64_t endpoint, room;
	int64_t state = -1;
	if (room_of(call->self, &endpoint, &room)) {
		if (kvs_py_attr_i64(call->self, "conclude_state", &state) && state == KVS_POLL_SUCCESS) {
			kvs_source_forget(endpoint, room);
		} else {
			kvs_source_cancel(endpoint, room);
			kvs_cleared_keep(call->self);
		}
	}
	return kvs_replaced_call(call);
}

/* ---- receiver ---- */

KvsPyObject *kvs_receiver_register(const struct kvs_replaced *call)
{
	uint64_t endpoint, room;
	struct kvs_frame frame = {.size = 0};
	if (room_of(call->self, &endpoint, &room))
		frame.size = kvs_endpoint_record(endpoint, frame.bytes);
	if (frame.size)
		kvs_sglang_frame_enter(&frame);
	KvsPyObject *result = kvs_replaced_call(call);
	kvs_sglang_frame_leave();
	return result;
}

/* Is there something to splice between this receiver's prefill and us? Without topology there is. */
static bool tp_differs(KvsPyObject *receiver, const struct kvs_manager *m)
{
	int64_t theirs = 0;
	KvsPyObject *info = kvs_py_attr(receiver, "prefill_info");
	bool known = info && kvs_py_attr_i64(info, "attn_tp_size", &theirs);
	kvs_py.Py_DecRef(info);
	return !known || theirs != (int64_t)m->layout->tp_size;
}

static void free_lists(struct kvs_item_list *lists, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		free((void *)lists[i].items);
}

/* Item list of each of our components, from send_metadata's arguments. */
static bool read_lists(const struct kvs_replaced *call, const struct kvs_layout *layout, struct kvs_item_list *lists_p,
                       struct kvs_text *text)
{
	KvsPyObject *kv = kvs_py_argument(call->args, call->kwargs, 0, "kv_indices");
	KvsPyObject *states = kvs_py_argument(call->args, call->kwargs, 2, "state_indices");
	ssize_t state_count = states && states != kvs_py.none ? kvs_py.PySequence_Size(states) : 0;
	kvs_py.PyErr_Clear();
	for (uint32_t c = 0; c < layout->component_count; c++) {
		const struct kvs_state_row *row = kvs_state_find(layout->components[c].type);
		KvsPyObject *list = NULL;
		int32_t *items = NULL;
		if (!row || row->sharding == KVS_SHARD_OTHER)
			continue;
		if (c == KVS_COMPONENT_KV) {
			list = kv;
			kvs_py.Py_IncRef(list);
		} else if ((ssize_t)c - 1 < state_count) {
			list = kvs_py.PySequence_GetItem(states, (ssize_t)c - 1);
		}
		bool ok = kvs_sglang_items(list, &items, &lists_p[c].count, text);
		kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(list);
		if (!ok)
			return false;
		lists_p[c].items = items;
	}
	return true;
}

/* Open the receiver's room at our agent; 0: not opened, and logged if it should have been. */
static uint64_t open_room(const struct kvs_replaced *call)
{
	uint64_t endpoint, room;
	if (!room_of(call->self, &endpoint, &room))
		return 0;
	KvsPyObject *manager = kvs_py_attr(call->self, "kv_mgr");
	struct kvs_manager *m = kvs_sglang_manager(manager);
	struct kvs_layout *layout = NULL;
	if (m && (kvs_options()->policy == KVS_POLICY_ALL || m->splice_equal || tp_differs(call->self, m)))
		layout = m->layout;
	struct kvs_item_list lists[KVS_MAX_COMPONENTS] = {{NULL, 0}};
	struct kvs_text text = {""};
	uint64_t generation = 0;
	if (layout) {
		uint32_t count = layout->component_count;
		if (read_lists(call, layout, lists, &text)) {
			void *state = kvs_py.PyEval_SaveThread();
			generation = kvs_room_open(endpoint, room, lists, count, &text);
			kvs_py.PyEval_RestoreThread(state);
		}
		free_lists(lists, count);
		if (!generation)
			kvs_log(KVS_LOG_WARN, "room %llu cannot be spliced: %s", (unsigned long long)room, text.s);
	}
	kvs_py.Py_DecRef(manager);
	return generation;
}

static bool is_open(KvsPyObject *receiver)
{
	uint64_t generation = 0;
	return kvs_py_attr_u64(receiver, ATTRIBUTE_ROOM, &generation) && generation != 0;
}

static void close_room(KvsPyObject *receiver, enum kvs_room_end end)
{
	uint64_t endpoint, room;
	if (!is_open(receiver) || !room_of(receiver, &endpoint, &room))
		return;
	void *state = kvs_py.PyEval_SaveThread();
	kvs_room_close(endpoint, room, end);
	kvs_py.PyEval_RestoreThread(state);
	if (kvs_py.PyObject_SetAttrString(receiver, ATTRIBUTE_ROOM, kvs_py.none) != 0)
		kvs_py.PyErr_Clear();
}

/*
 * Record our reason, and keep it: up to 0.5.19 the connector's own text, which knows less, overwrites it when the
 * prefill's status message comes later.
 */
static void record_reason(KvsPyObject *receiver, KvsPyObject *manager, uint64_t room, const char *reason)
{
	KvsPyObject *text = kvs_py.PyUnicode_FromString(reason);
	if (!text || kvs_py.PyObject_SetAttrString(receiver, ATTRIBUTE_REASON, text) != 0)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(text);
	if (manager)
		kvs_sglang_record_failure(manager, room, reason);
}

/* Conclude the receiver as the connector itself would, with our reason. */
static KvsPyObject *conclude_failed(KvsPyObject *receiver, uint64_t room, const char *reason)
{
	KvsPyObject *manager = kvs_py_attr(receiver, "kv_mgr");
	KvsPyObject *failed = kvs_py.PyLong_FromLongLong(KVS_POLL_FAILED);
	KvsPyObject *number = kvs_py_attr(receiver, "bootstrap_room");
	KvsPyObject *update = manager ? kvs_py_attr(manager, "update_status") : NULL;
	record_reason(receiver, manager, room, reason);
	if (update && number && failed) {
		KvsPyObject *result = kvs_py.PyObject_CallFunctionObjArgs(update, number, failed, NULL);
		kvs_py.Py_DecRef(result);
	}
	if (failed)
		kvs_py.PyObject_SetAttrString(receiver, "conclude_state", failed);
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(update);
	kvs_py.Py_DecRef(number);
	kvs_py.Py_DecRef(manager);
	return failed;
}

/* send_metadata that does not send: the room has failed. */
static KvsPyObject *refuse(KvsPyObject *receiver, const char *text)
{
	uint64_t endpoint, room;
	if (room_of(receiver, &endpoint, &room))
		kvs_py.Py_DecRef(conclude_failed(receiver, room, text));
	kvs_py.Py_IncRef(kvs_py.none);
	return kvs_py.none;
}

/* The room opened, the call made. */
static KvsPyObject *send_metadata(const struct kvs_replaced *call)
{
	struct kvs_frame frame;
	char text[KVS_TEXT_SIZE];
	uint64_t generation = open_room(call);
	/* Where the release would have refused the prefill nobody else may have the page lists. */
	if (!generation && kvs_lift_text(call->self, text, sizeof text))
		return refuse(call->self, text);
	if (generation) {
		KvsPyObject *number = kvs_py.PyLong_FromUnsignedLongLong(generation);
		if (!number || kvs_py.PyObject_SetAttrString(call->self, ATTRIBUTE_ROOM, number) != 0)
			kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(number);
		kvs_sglang_generation_frame(generation, &frame);
		kvs_sglang_frame_enter(&frame);
	}
	KvsPyObject *result = kvs_replaced_call(call);
	kvs_sglang_frame_leave();
	return result;
}

KvsPyObject *kvs_receiver_metadata(const struct kvs_replaced *call)
{
	char text[KVS_TEXT_SIZE];
	switch (kvs_lift_metadata(call)) {
	case KVS_LIFT_HELD:
		kvs_py.Py_IncRef(kvs_py.none);
		return kvs_py.none;
	case KVS_LIFT_OVER:
		return refuse(call->self, kvs_lift_text(call->self, text, sizeof text) ? text : "out of memory");
	default:
		return send_metadata(call);
	}
}

/*
 * A send_metadata call that waits for the prefill's agents: made when they have agreed, the room failed when they have
 * not in time. False: an exception of the call is set.
 */
static bool poll_held(KvsPyObject *receiver)
{
	uint64_t endpoint, room;
	char text[KVS_TEXT_SIZE];
	KvsPyObject *held = NULL;
	bool ok = true;
	switch (kvs_lift_poll(receiver, &held)) {
	case KVS_LIFT_OVER:
		if (room_of(receiver, &endpoint, &room) && kvs_lift_text(receiver, text, sizeof text)) {
			kvs_log(KVS_LOG_WARN, "room %llu: the prefill has not agreed in time; %s",
			        (unsigned long long)room, text);
			kvs_py.Py_DecRef(conclude_failed(receiver, room, text));
		}
		break;
	case KVS_LIFT_AGREED:
		if (held) {
			KvsPyObject *kwargs = kvs_py.PyTuple_GetItem(held, 2);
			KvsPyObject *result = send_metadata(&(struct kvs_replaced){
			        .original = kvs_py.PyTuple_GetItem(held, 0),
			        .self = receiver,
			        .args = kvs_py.PyTuple_GetItem(held, 1),
			        .kwargs = kwargs == kvs_py.none ? NULL : kwargs,
			});
			ok = result != NULL;
			kvs_py.Py_DecRef(result);
			kvs_py.Py_DecRef(held);
		}
		break;
	default:
		break;
	}
	return ok;
}

/* Is there still time for our agent to learn why a room failed that the connector calls failed? */
static bool reason_may_come(KvsPyObject *receiver)
{
	uint64_t since = 0, ns = kvs_now_ns();
	if (kvs_py_attr_u64(receiver, ATTRIBUTE_FAILED_AT, &since))
		return ns - since < REASON_NS;
	KvsPyObject *number = kvs_py.PyLong_FromUnsignedLongLong(ns);
	bool kept = number && kvs_py.PyObject_SetAttrString(receiver, ATTRIBUTE_FAILED_AT, number) == 0;
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(number);
	return kept;
}

/*
 * The connector knows that the room failed, our agent may be about to hear why: the two messages take different ways.
 * The room is reported as under way until it has, or for REASON_NS. Takes over result, the connector's status.
 */
static KvsPyObject *connector_failed(KvsPyObject *receiver, uint64_t endpoint, uint64_t room, KvsPyObject *result)
{
	struct kvs_text text = {""};
	if (kvs_room_state(endpoint, room, &text) == KVS_ROOM_FAILED) {
		KvsPyObject *manager = kvs_py_attr(receiver, "kv_mgr");
		record_reason(receiver, manager, room, text.s);
		kvs_py.Py_DecRef(manager);
	} else if (reason_may_come(receiver)) {
		kvs_py.Py_DecRef(result);
		return kvs_py.PyLong_FromLongLong(KVS_POLL_WAITING);
	}
	close_room(receiver, KVS_ROOM_FAILURE);
	return result;
}

KvsPyObject *kvs_receiver_poll(const struct kvs_replaced *call)
{
	uint64_t endpoint, room;
	struct kvs_text text = {""};
	if (!poll_held(call->self))
		return NULL;
	if (!is_open(call->self) || !room_of(call->self, &endpoint, &room))
		return kvs_replaced_call(call);
	if (kvs_room_state(endpoint, room, &text) == KVS_ROOM_FAILED) {
		close_room(call->self, KVS_ROOM_FAILURE);
		return conclude_failed(call->self, room, text.s);
	}
	KvsPyObject *result = kvs_replaced_call(call);
	if (!result)
		return NULL;
	long long status = kvs_py.PyLong_AsLongLong(result);
	if (kvs_py.PyErr_Occurred())
		kvs_py.PyErr_Clear();
	else if (status == KVS_POLL_SUCCESS)
		close_room(call->self, KVS_ROOM_SUCCESS);
	else if (status == KVS_POLL_FAILED)
		return connector_failed(call->self, endpoint, room, result);
	return result;
}

KvsPyObject *kvs_receiver_close(const struct kvs_replaced *call)
{
	kvs_lift_drop(call->self);
	close_room(call->self, KVS_ROOM_FAILURE);
	return kvs_replaced_call(call);
}

KvsPyObject *kvs_receiver_failure(const struct kvs_replaced *call)
{
	uint64_t endpoint, room;
	char reason[KVS_TEXT_SIZE];
	kvs_lift_drop(call->self);
	close_room(call->self, KVS_ROOM_FAILURE);
	if (kvs_py_attr_text(call->self, ATTRIBUTE_REASON, reason, sizeof reason) &&
	    room_of(call->self, &endpoint, &room)) {
		KvsPyObject *manager = kvs_py_attr(call->self, "kv_mgr");
		kvs_sglang_record_failure(manager, room, reason);
		kvs_py.Py_DecRef(manager);
	}
	return kvs_replaced_call(call);
}
