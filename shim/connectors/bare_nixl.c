/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include <unistd.h>

#include "../../policy/plan.h"
#include "bare.h"
#include "prefill.h"

/*
 * Descriptors in one transfer of the engine. UCX spends about 10 us on each, so that an abort is seen within 50 ms; far
 * larger batches are no faster.
 */
#define BATCH 4096

#define POLL_US 50 /* between two looks at a transfer in progress */

/* Every entry of object.name, a list of text, is this word; so is a list that is not there. */
static bool all_are(KvsPyObject *object, const char *name, const char *word)
{
	KvsPyObject *list = kvs_py_attr(object, name);
	ssize_t count = list ? kvs_py.PySequence_Size(list) : 0;
	bool yes = true;
	for (ssize_t i = 0; yes && i < count; i++) {
		char text[KVS_NAME_SIZE];
		KvsPyObject *item = kvs_py.PySequence_GetItem(list, i);
		yes = kvs_py_text(item, text, sizeof text) && strcmp(text, word) == 0;
		kvs_py.Py_DecRef(item);
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(list);
	return yes;
}

static struct kvs_layout *describe(const struct kvs_layout *own, KvsPyObject *info, struct kvs_text *text)
{
	if (!all_are(info, "dst_kv_mem_kinds", "VRAM")) {
		kvs_text_set(text,
		             "its KV pool is partly in host memory, as nixl's own sliced path requires it not to be");
		return NULL;
	}
	return kvs_bare_describe(own, info, text);
}

/* [(address, length, device)], a list of tuples as nixl_agent.get_xfer_descs takes it: one more entry. */
static bool append(KvsPyObject *list, uint64_t address, uint64_t length, uint64_t device)
{
	uint64_t values[3] = {address, length, device};
	KvsPyObject *tuple = kvs_py.PyTuple_New(3);
	bool ok = tuple != NULL;
	for (int i = 0; ok && i < 3; i++) {
		KvsPyObject *number = kvs_py.PyLong_FromUnsignedLongLong(values[i]);
		ok = number && kvs_py.PyTuple_SetItem(tuple, i, number) == 0;
	}
	ok = ok && kvs_py.PyList_Append(list, tuple) == 0;
	kvs_py.Py_DecRef(tuple);
	return ok;
}

struct batch {
	KvsPyObject *src;
	KvsPyObject *dst;
};

static bool next_batch(struct kvs_plan_iter *iter, uint64_t src_device, uint64_t dst_device, struct batch *batch_p)
{
	struct kvs_run run;
	batch_p->src = kvs_py.PyList_New(0);
	batch_p->dst = kvs_py.PyList_New(0);
	bool ok = batch_p->src && batch_p->dst;
	for (int n = 0; ok && n < BATCH && kvs_plan_next(iter, UINT64_MAX, &run); n++)
		ok = append(batch_p->src, run.src, run.len, src_device) &&
		     append(batch_p->dst, run.dst, run.len, dst_device);
	return ok;
}

/* The words that we call the agent with. */
struct words {
	KvsPyObject *write;
	KvsPyObject *vram;
	KvsPyObject *get_descs;
	KvsPyObject *initialize;
	KvsPyObject *transfer;
	KvsPyObject *check;
};

static bool words_make(struct words *w)
{
	*w = (struct words){
	        .write = kvs_py.PyUnicode_FromString("WRITE"),
	        .vram = kvs_py.PyUnicode_FromString("VRAM"),
	        .get_descs = kvs_py.PyUnicode_FromString("get_xfer_descs"),
	        .initialize = kvs_py.PyUnicode_FromString("initialize_xfer"),
	        .transfer = kvs_py.PyUnicode_FromString("transfer"),
	        .check = kvs_py.PyUnicode_FromString("check_xfer_state"),
	};
	return w->write && w->vram && w->get_descs && w->initialize && w->transfer && w->check;
}

static void words_drop(struct words *w)
{
	kvs_py.Py_DecRef(w->write);
	kvs_py.Py_DecRef(w->vram);
	kvs_py.Py_DecRef(w->get_descs);
	kvs_py.Py_DecRef(w->initialize);
	kvs_py.Py_DecRef(w->transfer);
	kvs_py.Py_DecRef(w->check);
}

/* "DONE", "PROC" or "ERR"; a call that raised is an error, whose exception is left set. */
static void state_of(KvsPyObject *agent, KvsPyObject *method, KvsPyObject *handle, char state_p[KVS_NAME_SIZE])
{
	KvsPyObject *state = kvs_py.PyObject_CallMethodObjArgs(agent, method, handle, NULL);
	if (!kvs_py_text(state, state_p, KVS_NAME_SIZE))
		memcpy(state_p, "ERR", sizeof "ERR");
	kvs_py.Py_DecRef(state);
}

/*
 * Post one batch and wait for it, as long as it is under way: a write in flight cannot be taken back. False: the engine
 * refused or failed it.
 */
static bool write_batch(KvsPyObject *agent, KvsPyObject *peer, const struct words *w, const struct batch *batch)
{
	char state[KVS_NAME_SIZE] = "ERR";
	KvsPyObject *src = kvs_py.PyObject_CallMethodObjArgs(agent, w->get_descs, batch->src, w->vram, NULL);
	KvsPyObject *dst =
	        src ? kvs_py.PyObject_CallMethodObjArgs(agent, w->get_descs, batch->dst, w->vram, NULL) : NULL;
	KvsPyObject *handle =
	        dst ? kvs_py.PyObject_CallMethodObjArgs(agent, w->initialize, w->write, src, dst, peer, NULL) : NULL;
	if (handle && kvs_py.PyObject_IsTrue(handle) == 1)
		state_of(agent, w->transfer, handle, state);
	while (strcmp(state, "PROC") == 0) {
		void *thread = kvs_py.PyEval_SaveThread();
		usleep(POLL_US);
		kvs_py.PyEval_RestoreThread(thread);
		state_of(agent, w->check, handle, state);
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(handle);
	kvs_py.Py_DecRef(dst);
	kvs_py.Py_DecRef(src);
	return strcmp(state, "DONE") == 0;
}

static uint64_t device_of(KvsPyObject *object)
{
	int64_t device = 0;
	return kvs_py_attr_i64(object, "gpu_id", &device) && device > 0 ? (uint64_t)device : 0;
}

static bool push(KvsPyObject *manager, KvsPyObject *request, const struct kvs_plan *plan, struct kvs_text *text)
{
	struct words words;
	uint64_t room = 0;
	KvsPyObject *agent = kvs_py_attr(manager, "agent");
	KvsPyObject *peer = kvs_py_attr(request, "agent_name");
	KvsPyObject *info = kvs_prefill_peer(manager, peer);
	KvsPyObject *kv_args = kvs_py_attr(manager, "kv_args");
	uint64_t src_device = device_of(kv_args), dst_device = device_of(info);
	struct kvs_plan_iter iter;
	kvs_plan_seek(&iter, plan, 0);
	kvs_sglang_room(request, "room", &room);
	bool ok = words_make(&words) && agent && info;
	if (!ok)
		kvs_text_set(text, "the manager has no agent, or the decode rank is not registered with it");
	for (uint64_t number = 0; ok; number++) {
		struct batch batch;
		ok = next_batch(&iter, src_device, dst_device, &batch);
		bool more = ok && kvs_py.PyList_Size(batch.src) > 0;
		if (!ok) {
			kvs_text_set(text, "out of memory for the descriptors of batch %llu",
			             (unsigned long long)number);
		} else if (more && kvs_splice_failed(manager, room, text)) {
			ok = false;
		} else if (more && !write_batch(agent, peer, &words, &batch)) {
			kvs_text_set(text,
			             "nixl's engine failed batch %llu of %d descriptors (%llu runs, %llu bytes in all)",
			             (unsigned long long)number, BATCH, (unsigned long long)plan->runs,
			             (unsigned long long)plan->bytes);
			ok = false;
		}
		kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(batch.src);
		kvs_py.Py_DecRef(batch.dst);
		if (!more)
			break;
	}
	words_drop(&words);
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(kv_args);
	kvs_py.Py_DecRef(info);
	kvs_py.Py_DecRef(peer);
	kvs_py.Py_DecRef(agent);
	return ok;
}

const struct kvs_bare_ops kvs_nixl_bare = {.describe = describe, .push = push};
