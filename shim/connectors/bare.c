/* SPDX-License-Identifier: Apache-2.0 */
#include "bare.h"

#include <string.h>
#include <unistd.h>

#include "../../policy/plan.h"

/*
 * Descriptors in one batch_transfer_sync call. Mooncake's TCP transport rejects batches near 20,000 ("lane
 * queue-full") and, while several ranks send to one decode, now and then one of 2,048. Small ones cost no time.
 */
#define BATCH 256

#define ATTEMPTS 3
#define PAUSE_US 100000

/* object.name[index], or object.name[outer][index] with outer >= 0, as an integer. */
static bool entry(KvsPyObject *object, const char *name, int64_t outer, uint32_t index, uint64_t *value_p)
{
	KvsPyObject *list = kvs_py_attr(object, name);
	if (list && outer >= 0) {
		KvsPyObject *inner = kvs_py.PySequence_GetItem(list, outer);
		kvs_py.Py_DecRef(list);
		list = inner;
	}
	KvsPyObject *item = list ? kvs_py.PySequence_GetItem(list, index) : NULL;
	if (item)
		*value_p = kvs_py.PyLong_AsUnsignedLongLong(item);
	bool ok = item && !kvs_py.PyErr_Occurred();
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(item);
	kvs_py.Py_DecRef(list);
	return ok;
}

static uint32_t count_of(KvsPyObject *object, const char *name, int64_t outer)
{
	KvsPyObject *list = kvs_py_attr(object, name);
	if (list && outer >= 0) {
		KvsPyObject *inner = kvs_py.PySequence_GetItem(list, outer);
		kvs_py.Py_DecRef(list);
		list = inner;
	}
	ssize_t size = list ? kvs_py.PySequence_Size(list) : 0;
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(list);
	return size > 0 && size <= KVS_MAX_TENSORS ? (uint32_t)size : 0;
}

/* A registration names no buffer lengths; item indexes come from the decode itself, so any index that fits is allowed.
 */
static uint64_t assumed_length(uint64_t address, uint64_t item_len)
{
	uint64_t length;
	uint64_t end;
	if (__builtin_mul_overflow(item_len, (uint64_t)INT32_MAX, &length) ||
	    __builtin_add_overflow(address, length, &end))
		return 0;
	return length;
}

/*
 * Item length of KV entry i on the decode. From 0.5.21 the registration lists them; before, it has the first one alone,
 * which gives the others by proportion as long as each half (K, V) of our own pool is uniform, since both halves then
 * have the same heads.
 */
static bool kv_item_len(const struct kvs_component *own, KvsPyObject *info, uint32_t i, uint64_t *item_len_p,
                        struct kvs_text *text)
{
	if (entry(info, "dst_kv_item_lens", -1, i, item_len_p))
		return true;
	uint64_t first = 0;
	kvs_py_attr_u64(info, "dst_kv_item_len", &first);
	uint32_t half = own->tensor_count / 2;
	uint64_t mine = own->tensors[i].item_len;
	uint64_t scaled;
	if (own->tensor_count % 2 != 0 || mine != own->tensors[i < half ? 0 : half].item_len || first == 0 ||
	    own->tensors[0].item_len == 0 || __builtin_mul_overflow(mine, first, &scaled) ||
	    scaled % own->tensors[0].item_len != 0) {
		kvs_text_set(text,
		             "its release registers the item length of its first KV buffer alone (%llu), and the %u "
		             "buffers here are not uniform: run kvsplice on the decode too",
		             (unsigned long long)first, own->tensor_count);
		return false;
	}
	*item_len_p = scaled / own->tensors[0].item_len;
	return true;
}

static bool describe_component(const struct kvs_layout *own, struct kvs_layout *layout, uint32_t c, KvsPyObject *info,
                               struct kvs_text *text)
{
	const struct kvs_component *mine = &own->components[c];
	struct kvs_component *theirs = &layout->components[c];
	bool kv = c == KVS_COMPONENT_KV;
	const char *ptrs = kv ? "dst_kv_ptrs" : "dst_state_data_ptrs";
	const char *ids = kv ? "dst_kv_layer_ids" : "dst_state_layer_ids";
	int64_t outer = kv ? -1 : (int64_t)c - 1;
	memcpy(theirs->type, mine->type, sizeof theirs->type);
	theirs->order = mine->order;
	uint32_t count = mine->tensor_count ? count_of(info, ptrs, outer) : 0;
	if (count == 0)
		return true; /* judged as a difference in tensors, if it is one */
	if (!kvs_layout_set_tensors(layout, c, count)) {
		kvs_text_set(text, "out of memory for %u tensors", count);
		return false;
	}
	bool has_ids = count_of(info, ids, outer) == count;
	for (uint32_t i = 0; i < count; i++) {
		struct kvs_tensor *t = &theirs->tensors[i];
		uint64_t id = 0;
		bool ok = entry(info, ptrs, outer, i, &t->address);
		if (ok && !kv)
			ok = entry(info, "dst_state_item_lens", outer, i, &t->item_len);
		if (!ok) {
			kvs_text_set(text, "tensor %u of component %s has no address or item length", i, mine->type);
			return false;
		}
		if (kv && (i >= mine->tensor_count || !kv_item_len(mine, info, i, &t->item_len, text)))
			return false;
		t->length = assumed_length(t->address, t->item_len);
		t->layer_id =
		        has_ids && entry(info, ids, outer, i, &id) && id <= INT32_MAX ? (int32_t)id : KVS_NO_LAYER;
	}
	return true;
}

struct kvs_layout *kvs_bare_describe(const struct kvs_layout *own, KvsPyObject *info, struct kvs_text *text)
{
	int64_t tp_size = 0, tp_rank = 0;
	KvsPyObject *ids = kvs_py_attr(info, "dst_kv_layer_ids");
	kvs_py.Py_DecRef(ids);
	/* The field came with 0.5.17, as did the comparison of resolved dtypes; without that one a dtype mismatch looks
	 * like a TP ratio. From the same release on a decode with state registers layer ids (empty ones) for it. */
	if (!ids || (own->component_count > 1 && count_of(info, "dst_state_layer_ids", -1) == 0)) {
		kvs_text_set(text,
		             "the release on %s side does not compare KV dtypes (0.5.17 does): run kvsplice on "
		             "the decode too",
		             ids ? "its" : "this");
		return NULL;
	}
	if (!kvs_splice_peer_tp_size(info, &tp_size) || tp_size < 1 || tp_size > INT32_MAX ||
	    !(kvs_py_attr_i64(info, "dst_tp_rank", &tp_rank) || kvs_py_attr_i64(info, "decode_tp_rank", &tp_rank)) ||
	    tp_rank < 0) {
		kvs_text_set(text, "its registration has TP size %lld and rank %lld", (long long)tp_size,
		             (long long)tp_rank);
		return NULL;
	}
	struct kvs_layout *layout = kvs_layout_new(own->component_count);
	if (!layout) {
		kvs_text_set(text, "out of memory");
		return NULL;
	}
	layout->tp_size = (uint32_t)tp_size;
	layout->tp_rank = (uint32_t)(tp_rank % tp_size);
	layout->pp_size = 1;
	layout->page_size = own->page_size;
	layout->head_rule = own->head_rule;
	memcpy(layout->dtype, own->dtype, sizeof layout->dtype);
	for (uint32_t c = 0; c < own->component_count; c++)
		if (!describe_component(own, layout, c, info, text)) {
			if (!text->s[0])
				kvs_text_set(text, "it registers more KV buffers than this server has");
			kvs_layout_free(layout);
			return NULL;
		}
	return layout;
}

/* The next batch of runs as three lists of integers; NULL lists at the end. False: out of memory. */
static bool next_batch(struct kvs_plan_iter *iter, KvsPyObject *lists_p[3])
{
	struct kvs_run run;
	bool ok = true;
	for (int i = 0; i < 3; i++) {
		lists_p[i] = kvs_py.PyList_New(0);
		ok = ok && lists_p[i];
	}
	for (int n = 0; ok && n < BATCH && kvs_plan_next(iter, UINT64_MAX, &run); n++) {
		uint64_t values[3] = {run.src, run.dst, run.len};
		for (int i = 0; ok && i < 3; i++) {
			KvsPyObject *number = kvs_py.PyLong_FromUnsignedLongLong(values[i]);
			ok = number && kvs_py.PyList_Append(lists_p[i], number) == 0;
			kvs_py.Py_DecRef(number);
		}
	}
	return ok;
}

/*
 * One call of the engine, tried again after a pause: its queues are shared by all ranks that send to a decode, so a
 * batch can be refused for the others' sake. The bytes are the same every time, and the room is still open.
 */
static long long push_batch(KvsPyObject *transfer, KvsPyObject *session, KvsPyObject *const lists[3])
{
	long long rc = -1;
	for (int attempt = 0; rc != 0 && attempt < ATTEMPTS; attempt++) {
		if (attempt > 0) {
			void *state = kvs_py.PyEval_SaveThread();
			usleep(PAUSE_US);
			kvs_py.PyEval_RestoreThread(state);
		}
		KvsPyObject *result =
		        kvs_py.PyObject_CallFunctionObjArgs(transfer, session, lists[0], lists[1], lists[2], NULL);
		rc = result ? kvs_py.PyLong_AsLongLong(result) : -1;
		kvs_py.Py_DecRef(result);
		kvs_py.PyErr_Clear();
	}
	return rc;
}

static bool push(KvsPyObject *manager, KvsPyObject *request, const struct kvs_plan *plan, struct kvs_text *text)
{
	KvsPyObject *engine = kvs_py_attr(manager, "engine");
	KvsPyObject *transfer = engine ? kvs_py_attr(engine, "batch_transfer_sync") : NULL;
	KvsPyObject *session = kvs_py_attr(request, "mooncake_session_id");
	bool ok = transfer && session;
	if (!ok)
		kvs_text_set(text, "the manager has no engine.batch_transfer_sync");
	struct kvs_plan_iter iter;
	kvs_plan_seek(&iter, plan, 0);
	for (uint64_t batch = 0; ok; batch++) {
		KvsPyObject *lists[3] = {NULL, NULL, NULL};
		ok = next_batch(&iter, lists);
		bool more = ok && kvs_py.PyList_Size(lists[0]) > 0;
		long long rc = 0;
		if (more)
			rc = push_batch(transfer, session, lists);
		for (int i = 0; i < 3; i++)
			kvs_py.Py_DecRef(lists[i]);
		if (!ok)
			kvs_text_set(text, "out of memory for the descriptors of batch %llu",
			             (unsigned long long)batch);
		if (rc != 0) {
			kvs_text_set(
			        text,
			        "mooncake's engine returned %lld %d times for batch %llu of %d descriptors (%llu runs, "
			        "%llu bytes in all)",
			        rc, ATTEMPTS, (unsigned long long)batch, BATCH, (unsigned long long)plan->runs,
			        (unsigned long long)plan->bytes);
			ok = false;
		}
		if (!more)
			break;
	}
	kvs_py.Py_DecRef(session);
	kvs_py.Py_DecRef(transfer);
	kvs_py.Py_DecRef(engine);
	return ok;
}

const struct kvs_bare_ops kvs_mooncake_bare = {.describe = kvs_bare_describe, .push = push};
