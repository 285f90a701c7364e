/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operations table of the transports. One row each in KVS_TRANSPORT_TABLE; a row without operations is a name that
 * the option knows and this build cannot do.
 *
 * A transfer of one pull over one transport is a stream: the canonical bytes of its plan (policy/plan.h), from the
 * prefill's worker to the decode's agent. The decode chooses the transport and says go.
 */
#ifndef KVS_TRANSPORT_TRANSPORT_H
#define KVS_TRANSPORT_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "../policy/plan.h"
#include "copy.h"

struct kvs_link;
struct kvs_request;

/* Number on the wire and in masks (never used again for another), enumerator, name, operations, why there are none. */
#define KVS_TRANSPORT_TABLE(X) \
	X(0, CUDA_IPC, "cuda_ipc", &kvs_transport_cuda_ipc, "") \
	X(1, RDMA, "rdma", &kvs_transport_rdma, "") \
	X(2, HOST, "host", &kvs_transport_host, "") \
	X(3, TCP, "tcp", &kvs_transport_tcp, "") \
	X(4, ENGINE, "engine", NULL, "for peers without kvsplice")

enum kvs_transport_id {
#define X(number, id, name, ops, reason) KVS_TRANSPORT_##id = (number),
	KVS_TRANSPORT_TABLE(X)
#undef X
	        KVS_TRANSPORT_COUNT
};

enum kvs_step {
	KVS_STEP_IDLE,     /* nothing there */
	KVS_STEP_PROGRESS, /* one piece is in place */
	KVS_STEP_DONE,     /* all of it is */
	KVS_STEP_FAILED,   /* this transport cannot go on with this link: hand over to the next */
	KVS_STEP_BROKEN,   /* the peer does what no peer may: drop the link */
};

/* The receiving side of a stream. */
struct kvs_sink {
	uint64_t stream;
	uint32_t component;
	const struct kvs_plan *plan;
	struct kvs_cursor cursor;
	uint64_t position; /* bytes in place */
};

struct kvs_transport_ops {
	/* Decode, at the handshake, the room's lock held: can this link use it? False with the reason. */
	bool (*probe)(const struct kvs_link *link, struct kvs_text *reason);
	/* Decode, at the handshake, the lock held: make what it needs. False with text: it is passed over. */
	bool (*open)(struct kvs_link *link, struct kvs_text *text);
	/*
	 * Prefill, the worker, no lock held, the only one in this link's stream: pack and send the request's plan. Ends
	 * early, with false, when the request is told to stop (kvs_request_stopped) and at its deadline. False with
	 * text.
	 */
	bool (*send)(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text);
	/* Decode, the agent, no lock held: take at most one piece (far below 2 ms of copying). text for the failures.
	 */
	enum kvs_step (*pull)(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text);
	/* Decode, the agent: is it worth calling pull now? Cheap, for the spin before sleeping. NULL: events tell. */
	bool (*ready)(const struct kvs_link *link);
	/* Decode, the agent, about to sleep: ask to be woken. False: something is there already. NULL: events tell. */
	bool (*wait)(struct kvs_link *link);
	/*
	 * Decode, the agent: may memory still be written between two pulls? While it is true the room is not closed;
	 * close ends it. NULL: never.
	 */
	bool (*in_flight)(const struct kvs_link *link);
	/* Either end, the lock held: the stream ended; ok: every byte of it was taken. What is in flight is stale. */
	void (*close)(struct kvs_link *link, bool ok);
};

struct kvs_transport_row {
	const char *name;
	const struct kvs_transport_ops *ops; /* NULL: reason says why */
	const char *reason;
};

extern const struct kvs_transport_ops kvs_transport_cuda_ipc;
extern const struct kvs_transport_ops kvs_transport_rdma;
extern const struct kvs_transport_ops kvs_transport_host;
extern const struct kvs_transport_ops kvs_transport_tcp;

/* By number. Not constant: the table's rows are the one place where a transport is plugged in. */
extern struct kvs_transport_row kvs_transports[KVS_TRANSPORT_COUNT];

/* Order of preference from the option's text. Returns how many, 0 with text: an unknown name, one twice, or none. */
uint32_t kvs_transport_order(const char *names, uint32_t order_p[KVS_TRANSPORT_COUNT], struct kvs_text *text);

#endif
