/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One component of one chunk of one request, on the prefill's transfer worker: judged, and moved by our own transport
 * or through the connector's engine. Interpreter lock held on entry and exit, released while waiting; no Python
 * exception is left set.
 */
#ifndef KVS_CONNECTORS_SPLICE_H
#define KVS_CONNECTORS_SPLICE_H

#include "../../policy/plan.h"
#include "sglang.h"

/* The decode rank that a registration info object stands for. Owned by a capsule in that object. */
struct kvs_peer {
	uint64_t id;             /* of its agent; 0: none */
	struct kvs_text refusal; /* not empty: its endpoint record could not be used, so it is not spliced for */
	struct kvs_layout
	        *bare; /* a decode without the library, as its registration describes it; NULL: not asked yet */
	bool told;     /* that this peer is bare, or why it stays on the stock path */
};

/* Attach a peer to a registration info object, from the frame that came with it. */
void kvs_splice_add_peer(KvsPyObject *info, const struct kvs_frame *frame);

/* Does this registration info's decode rank run the library? */
bool kvs_splice_is_preloaded(KvsPyObject *info);

/* Note on a transfer info object which use of its room number it belongs to. */
void kvs_splice_set_generation(KvsPyObject *request, const struct kvs_frame *frame);

/* What a connector does for a decode without the library. */
struct kvs_bare_ops {
	/* Describe the decode rank from its registration info; NULL with text: this release does not say enough. */
	struct kvs_layout *(*describe)(const struct kvs_layout *own, KvsPyObject *info, struct kvs_text *text);
	/* Move the plan's runs with the connector's own engine; called with the interpreter lock. */
	bool (*push)(KvsPyObject *manager, KvsPyObject *request, const struct kvs_plan *plan, struct kvs_text *text);
};

struct kvs_send {
	KvsPyObject *manager;
	KvsPyObject *info;    /* registration info of the decode rank */
	KvsPyObject *request; /* the room's transfer info of that rank */
	uint32_t component;
	KvsPyObject *src_items;
	KvsPyObject *dst_items;
	const struct kvs_bare_ops *bare; /* NULL: none, such a decode stays on the connector's own path */
	/*
	 * Not NULL: this thread must not wait. A transfer that was started is KVS_SENT_DONE with its status object
	 * (later.h), new, here.
	 */
	KvsPyObject **status_p;
};

enum kvs_sent {
	KVS_SENT_STOCK,  /* not ours: call the original */
	KVS_SENT_DONE,   /* the bytes are in place, or another rank sends them */
	KVS_SENT_FAILED, /* nothing (more) is written and the room is marked; report success to the caller */
};

enum kvs_sent kvs_splice_send(const struct kvs_send *send);

/* Did this room fail on our side, or was it cancelled? text_p (may be NULL) gets the reason. */
bool kvs_splice_failed(KvsPyObject *manager, uint64_t room, struct kvs_text *text_p);

/* The same of a transfer info's room, also when its memory was given back since. */
bool kvs_splice_request_failed(KvsPyObject *manager, KvsPyObject *request, struct kvs_text *text_p);

/* KVSPLICE_POLICY=off: say once per decode rank what would be spliced for it. */
void kvs_splice_observe(KvsPyObject *manager, KvsPyObject *info);

/* The decode rank's attention TP size, by whatever name its connector has it. */
bool kvs_splice_peer_tp_size(KvsPyObject *info, int64_t *size_p);

/* Are these two of different attention TP sizes, so that there is something to splice? */
bool kvs_splice_tp_differs(KvsPyObject *manager, KvsPyObject *info);

#endif
