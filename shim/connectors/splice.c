/* SPDX-License-Identifier: Apache-2.0 */
#include "splice.h"

#include <stdlib.h>
#include <string.h>

#include "../../transport/log.h"
#include "../options.h"
#include "later.h"

#define ATTRIBUTE_PEER       "_kvsplice_peer"
#define ATTRIBUTE_GENERATION "_kvsplice_generation"
#define ATTRIBUTE_CHUNK      "_kvsplice_chunk"
#define ATTRIBUTE_FAILED     "_kvsplice_failed"

static void peer_destroy(KvsPyObject *capsule)
{
	struct kvs_peer *peer = kvs_py.PyCapsule_GetPointer(capsule, KVS_CAPSULE);
	if (!peer)
		return;
	if (peer->id)
		kvs_peer_remove(peer->id);
	kvs_layout_free(peer->bare);
	free(peer);
}

static struct kvs_peer *attach_peer(KvsPyObject *info)
{
	struct kvs_peer *peer = calloc(1, sizeof *peer);
	if (peer && !kvs_sglang_attach(info, ATTRIBUTE_PEER, peer, peer_destroy))
		peer = NULL;
	if (!peer)
		kvs_log(KVS_LOG_WARN, "no memory to remember a decode rank: it stays on the connector's own path");
	return peer;
}

void kvs_splice_add_peer(KvsPyObject *info, const struct kvs_frame *frame)
{
	struct kvs_peer *peer = attach_peer(info);
	if (!peer)
		return;
	struct kvs_text text = {""};
	peer->id = kvs_peer_add(frame->bytes, frame->size, &text);
	if (!peer->id) {
		peer->refusal = text;
		kvs_log(KVS_LOG_WARN, "a decode rank registered with an endpoint record that cannot be used: %s",
		        text.s);
	}
}

bool kvs_splice_is_preloaded(KvsPyObject *info)
{
	struct kvs_peer *peer = kvs_sglang_attached(info, ATTRIBUTE_PEER);
	return peer && (peer->id || peer->refusal.s[0]);
}

void kvs_splice_set_generation(KvsPyObject *request, const struct kvs_frame *frame)
{
	uint64_t generation = 0;
	if (!kvs_sglang_generation(frame, &generation))
		return;
	KvsPyObject *number = kvs_py.PyLong_FromUnsignedLongLong(generation);
	if (!number || kvs_py.PyObject_SetAttrString(request, ATTRIBUTE_GENERATION, number) != 0)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(number);
}

bool kvs_splice_peer_tp_size(KvsPyObject *info, int64_t *size_p)
{
	return kvs_py_attr_i64(info, "dst_attn_tp_size", size_p) || kvs_py_attr_i64(info, "decode_tp_size", size_p);
}

bool kvs_splice_tp_differs(KvsPyObject *manager, KvsPyObject *info)
{
	int64_t own = 0, theirs = 0;
	return kvs_py_attr_i64(manager, "attn_tp_size", &own) && kvs_splice_peer_tp_size(info, &theirs) &&
	       own != theirs;
}

bool kvs_splice_failed(KvsPyObject *manager, uint64_t room, struct kvs_text *text_p)
{
	struct kvs_manager *m = kvs_sglang_manager(manager);
	return m && kvs_source_failed(m->endpoint, room, text_p);
}

bool kvs_splice_request_failed(KvsPyObject *manager, KvsPyObject *request, struct kvs_text *text_p)
{
	uint64_t room = 0;
	if (kvs_sglang_room(request, "room", &room) && kvs_splice_failed(manager, room, text_p))
		return true;
	/* The mark outlives the endpoint: memory that was given back in mid-request must not end in a success. */
	char reason[KVS_TEXT_SIZE];
	if (!kvs_py_attr_text(request, ATTRIBUTE_FAILED, reason, sizeof reason))
		return false;
	if (text_p)
		kvs_text_set(text_p, "%s", reason);
	return true;
}

void kvs_splice_observe(KvsPyObject *manager, KvsPyObject *info)
{
	if (!info || kvs_options()->policy != KVS_POLICY_OFF || !kvs_splice_tp_differs(manager, info))
		return;
	struct kvs_peer *peer = kvs_sglang_attached(info, ATTRIBUTE_PEER);
	if (!peer)
		peer = attach_peer(info);
	if (!peer || peer->told)
		return;
	peer->told = true;
	int64_t own = 0, theirs = 0;
	kvs_py_attr_i64(manager, "attn_tp_size", &own);
	kvs_splice_peer_tp_size(info, &theirs);
	kvs_log(KVS_LOG_INFO,
	        "KVSPLICE_POLICY=off: prefill_tp_size=%lld, decode_tp_size=%lld is left to the connector; auto would "
	        "splice it",
	        (long long)own, (long long)theirs);
}

/* Is this transport named in KVSPLICE_TRANSPORT? */
static bool transport_named(const char *name)
{
	size_t length = strlen(name);
	for (const char *p = kvs_options()->transport; p && *p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
		if (strncmp(p, name, length) == 0 && (p[length] == ',' || p[length] == '\0'))
			return true;
	return false;
}

/* The request in numbers, from the moment that it is known to be ours. */
struct job {
	KvsPyObject *request;
	uint64_t endpoint;
	uint64_t room;
	uint64_t generation;
	uint64_t peer;
	const char *component;
	int32_t *src;
	int32_t *dst;
	uint32_t src_count;
	uint32_t dst_count;
};

/* Nothing more is sent for this request, and send_aux fails it. */
static enum kvs_sent mark(KvsPyObject *request, const char *reason)
{
	KvsPyObject *text = kvs_py.PyUnicode_FromString(reason);
	if (!text || kvs_py.PyObject_SetAttrString(request, ATTRIBUTE_FAILED, text) != 0)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(text);
	return KVS_SENT_FAILED;
}

static bool told_already(KvsPyObject *request)
{
	char reason[KVS_TEXT_SIZE];
	return kvs_py_attr_text(request, ATTRIBUTE_FAILED, reason, sizeof reason);
}

/* The room failed towards another decode rank, or was cancelled: this one hears of it too. */
static enum kvs_sent share(const struct job *job, const char *reason)
{
	kvs_source_fail(job->endpoint, job->peer, job->room, job->generation, reason);
	return mark(job->request, reason);
}

static enum kvs_sent fail(const struct job *job, const char *reason)
{
	kvs_log(KVS_LOG_WARN, "room %llu, component %s: %s", (unsigned long long)job->room, job->component, reason);
	return share(job, reason);
}

static uint32_t next_chunk(KvsPyObject *request)
{
	uint64_t chunk = 0;
	kvs_py_attr_u64(request, ATTRIBUTE_CHUNK, &chunk);
	KvsPyObject *next = kvs_py.PyLong_FromUnsignedLongLong(chunk + 1);
	if (!next || kvs_py.PyObject_SetAttrString(request, ATTRIBUTE_CHUNK, next) != 0)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(next);
	return (uint32_t)chunk;
}

static enum kvs_sent send_pull(const struct kvs_send *send, struct job *job)
{
	struct kvs_verdict verdict;
	struct kvs_pull pull = {
	        .endpoint = job->endpoint,
	        .peer = job->peer,
	        .room = job->room,
	        .generation = job->generation,
	        .chunk = next_chunk(send->request),
	        .component = send->component,
	        .src_items = job->src,
	        .src_count = job->src_count,
	        .dst_items = job->dst,
	        .dst_count = job->dst_count,
	};
	struct kvs_text text = {""};
	if (send->status_p) {
		*send->status_p = kvs_later_start(&pull, job->component, &text);
		return *send->status_p ? KVS_SENT_DONE : fail(job, text.s);
	}
	bool moved = false;
	void *state = kvs_py.PyEval_SaveThread();
	kvs_peer_verdict(job->endpoint, job->peer, send->component, &verdict);
	if (verdict.action == KVS_ACT_COPY || verdict.action == KVS_ACT_SLICE)
		moved = kvs_pull(&pull, &text);
	kvs_py.PyEval_RestoreThread(state);
	switch (verdict.action) {
	case KVS_ACT_PASS:
		return KVS_SENT_STOCK;
	case KVS_ACT_SKIP:
		return KVS_SENT_DONE;
	case KVS_ACT_REFUSE:
		return fail(job, verdict.text.s);
	default:
		/* The agent has logged it, and told the decode. */
		return moved ? KVS_SENT_DONE : mark(job->request, text.s);
	}
}

/* Say once per decode rank that it stays on the connector's own path, and why. */
static enum kvs_sent leave(struct kvs_peer *peer, const char *reason)
{
	if (!peer->told)
		kvs_log(KVS_LOG_WARN, "a decode rank without kvsplice is left to the connector's own path: %s", reason);
	peer->told = true;
	return KVS_SENT_STOCK;
}

static enum kvs_sent send_bare(const struct kvs_send *send, struct kvs_peer *peer, const struct kvs_manager *m,
                               struct job *job)
{
	struct kvs_text text = {""};
	if (!send->bare)
		return leave(peer, "this connector has no engine route");
	if (!transport_named("engine"))
		return leave(peer, "KVSPLICE_TRANSPORT does not name engine, the only way to reach it");
	if (!peer->bare)
		peer->bare = send->bare->describe(m->layout, send->info, &text);
	if (!peer->bare)
		return leave(peer, text.s);
	struct kvs_verdict verdict;
	kvs_policy_judge(m->layout, peer->bare, send->component, false, &verdict);
	if (verdict.action == KVS_ACT_PASS)
		return KVS_SENT_STOCK;
	if (verdict.action == KVS_ACT_REFUSE)
		return fail(job, verdict.text.s);
	if (!peer->told)
		kvs_log(KVS_LOG_INFO, "route engine: the decode rank runs without kvsplice, the connector's engine is "
		                      "the only way to reach it");
	peer->told = true;
	struct kvs_plan *plan = NULL;
	if (!kvs_plan_build(m->layout, peer->bare, send->component, job->src, job->src_count, job->dst, job->dst_count,
	                    &plan, &verdict))
		return fail(job, verdict.text.s);
	bool moved = send->bare->push(send->manager, send->request, plan, &text);
	kvs_plan_free(plan);
	return moved ? KVS_SENT_DONE : fail(job, text.s);
}

enum kvs_sent kvs_splice_send(const struct kvs_send *send)
{
	struct kvs_manager *m = kvs_sglang_manager(send->manager);
	if (!m || m->role != KVS_ROLE_PREFILL)
		return KVS_SENT_STOCK;
	bool equal = !kvs_splice_tp_differs(send->manager, send->info);
	if (equal && kvs_options()->policy != KVS_POLICY_ALL && !kvs_sglang_splices_equal(m, send->component))
		return KVS_SENT_STOCK;
	struct job job = {.request = send->request,
	                  .endpoint = m->endpoint,
	                  .component = send->component < m->layout->component_count
	                                       ? m->layout->components[send->component].type
	                                       : "?"};
	char component[KVS_NAME_SIZE];
	memcpy(component, job.component, strlen(job.component) + 1);
	job.component = component; /* m may go while the interpreter lock is released */
	struct kvs_text text = {""};
	if (!kvs_sglang_room(send->request, "room", &job.room))
		return KVS_SENT_STOCK;
	kvs_py_attr_u64(send->request, ATTRIBUTE_GENERATION, &job.generation);
	struct kvs_peer *peer = kvs_sglang_attached(send->info, ATTRIBUTE_PEER);
	if (!peer)
		peer = attach_peer(send->info);
	if (!peer)
		return KVS_SENT_STOCK;
	/* At equal TP the decode opens a room only when it, too, splices everything. */
	if (!job.generation && equal)
		return KVS_SENT_STOCK;
	job.peer = peer->id;
	if (kvs_splice_request_failed(send->manager, send->request, &text))
		return told_already(send->request) ? KVS_SENT_FAILED : share(&job, text.s);
	if (peer->refusal.s[0])
		return fail(&job, peer->refusal.s);
	enum kvs_sent sent;
	if (!kvs_sglang_items(send->src_items, &job.src, &job.src_count, &text) ||
	    !kvs_sglang_items(send->dst_items, &job.dst, &job.dst_count, &text))
		sent = fail(&job, text.s);
	else if (peer->id)
		sent = send_pull(send, &job);
	else
		sent = send_bare(send, peer, m, &job);
	free(job.src);
	free(job.dst);
	return sent;
}
