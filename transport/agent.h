/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent: one event-driven thread per process, started at the first registration, prefill and decode alike. It owns
 * the control sockets and, on a decode, is the only one that writes registered memory: the decode pulls.
 *
 * Words: an endpoint is one registered connector manager of this process (a rank, in one role). A link is the control
 * connection between a prefill endpoint and a decode endpoint; the prefill connects. A room is one request on one
 * decode endpoint (SGLang's bootstrap_room) with a generation that tells two uses of one number apart.
 *
 * Threads: every function may be called from any thread, and none calls Python. Those marked WAITS may block and must
 * be called without the interpreter lock; the others do not block. After a fork the child has no agent: every id of the
 * parent is unknown to it and its own first registration starts a new one.
 */
#ifndef KVS_TRANSPORT_AGENT_H
#define KVS_TRANSPORT_AGENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../policy/layout.h"
#include "../policy/verdict.h"

#define KVS_RECORD_MAX 512 /* bytes of an endpoint record, at most */

enum kvs_role {
	KVS_ROLE_PREFILL,
	KVS_ROLE_DECODE,
};

/* Set once by the shim before the first registration; strings are copied. */
struct kvs_agent_config {
	uint32_t timeout_ms;    /* for one request's transfer, and for the first handshake */
	uint64_t staging_bytes; /* per link */
	const char *transports; /* comma-separated names in order of preference */
	const char *listen; /* ADDRESS[:FIRST-LAST] of the control socket; NULL: the address given at registration */
	const char *secret_file;    /* NULL: none */
	const char *stats_path;     /* NULL: none; the metrics go to "<path>.<pid>" */
	bool splice_equal_tp;       /* KVSPLICE_POLICY=all */
	bool verify;                /* KVSPLICE_VERIFY: the decode compares digests */
	const char *rdma_device;    /* "name" or "name:port"; NULL or empty: chosen */
	int rdma_gid;               /* 1 + the index of the only GID to use; 0: chosen */
	uint8_t rdma_service_level; /* 0 to 15 */
	uint8_t rdma_traffic_class;
	uint8_t cuda_copy; /* KVSPLICE_CUDA_COPY: enum kvs_cuda_method */
};

/* False: a value makes no sense (text says which) and the former configuration stays. */
bool kvs_agent_configure(const struct kvs_agent_config *config, struct kvs_text *text);

/*
 * Register a manager's memory. host: the address that peers reach this server at. rank: for logs. The layout is copied.
 * Starts the agent if it is not running. Returns an endpoint id > 0, or 0 with text.
 */
uint64_t kvs_endpoint_add(enum kvs_role role, const struct kvs_layout *layout, const char *host, struct kvs_text *text);

/* Forget it: rooms are closed (waits for pieces in flight), links dropped. Unknown ids are ignored. WAITS */
void kvs_endpoint_remove(uint64_t endpoint);

/* Decode: the endpoint record to put in the registration message. Returns its size, 0: unknown endpoint. */
size_t kvs_endpoint_record(uint64_t endpoint, uint8_t record_p[KVS_RECORD_MAX]);

/* ---- prefill ---- */

/* Does this buffer begin like an endpoint record (any version)? */
bool kvs_record_is(const void *data, size_t size);

/*
 * A decode's record, as it came in its registration message. Checked for form and stored, nothing more; the connection
 * is made in the background when there is one prefill endpoint, else at the first kvs_peer_verdict. Returns a peer id >
 * 0, or 0 with text (malformed, wrong version). A peer is forgotten with kvs_peer_remove or when its process is gone.
 */
uint64_t kvs_peer_add(const void *record, size_t size, struct kvs_text *text);

/* Drop one reference made by kvs_peer_add. */
void kvs_peer_remove(uint64_t peer);

/*
 * What is to be done with a component between this endpoint and this peer, as both agents agreed at the handshake; the
 * first call waits for the handshake, at most the configured timeout. Also KVS_ACT_REFUSE with KVS_REFUSE_NONE when the
 * peer cannot be reached or no transport can carry the component: text says why. WAITS
 */
void kvs_peer_verdict(uint64_t endpoint, uint64_t peer, uint32_t component, struct kvs_verdict *verdict_p);

struct kvs_pull {
	uint64_t endpoint; /* ours, prefill */
	uint64_t peer;
	uint64_t room;
	uint64_t generation; /* from the metadata message; 0: the room's current one at the decode */
	uint32_t chunk;      /* number of this call among those for (room, component) */
	uint32_t component;
	const int32_t *src_items;
	uint32_t src_count;
	const int32_t *dst_items;
	uint32_t dst_count;
};

/*
 * Have the decode pull these items, packing what its route needs, until the bytes are in place. True: they are. False:
 * they are not and no more of this call will be written; text says why. Returns early, with false, on a cancelled
 * source room, a closed room, a lost connection, the timeout. WAITS
 */
bool kvs_pull(const struct kvs_pull *pull, struct kvs_text *text);

/* The source pages of this room may be reused: running and later kvs_pull calls for it end with false. */
void kvs_source_cancel(uint64_t endpoint, uint64_t room);

/* The sender of this room is gone and its number may be used again: forget the cancel flag and any failure. */
void kvs_source_forget(uint64_t endpoint, uint64_t room);

/*
 * Mark a source room as failed: the first text stays and is told to the decode agents that know the room. kvs_pull does
 * this by itself; the shim calls it for refusals. peer 0: no decode to tell.
 */
void kvs_source_fail(uint64_t endpoint, uint64_t peer, uint64_t room, uint64_t generation, const char *text);

/* Has this source room failed (text_p gets the first reason) or been cancelled? */
bool kvs_source_failed(uint64_t endpoint, uint64_t room, struct kvs_text *text_p);

/* ---- decode ---- */

struct kvs_item_list {
	const int32_t *items;
	uint32_t count;
};

/*
 * Open a room before its metadata is sent: lists[c] are the destination items of component c (component_count of them;
 * fewer than the layout's: the rest are empty). They are copied. Returns the generation > 0, or 0 with text: an item
 * past the end of its tensors, an unknown endpoint, out of memory. A room that is open under this number is closed
 * first. WAITS
 */
uint64_t kvs_room_open(uint64_t endpoint, uint64_t room, const struct kvs_item_list *lists, uint32_t component_count,
                       struct kvs_text *text);

enum kvs_room_state {
	KVS_ROOM_UNKNOWN,
	KVS_ROOM_OPEN,
	KVS_ROOM_FAILED,
};

/* Where the room stands; text_p (may be NULL) gets the reason of a failure. */
enum kvs_room_state kvs_room_state(uint64_t endpoint, uint64_t room, struct kvs_text *text_p);

enum kvs_room_end {
	KVS_ROOM_SUCCESS, /* the connector reported success */
	KVS_ROOM_FAILURE, /* it reported failure, or the request was aborted */
};

/*
 * Close the room: nothing of ours is written for it after this returns. Idempotent; waits for the piece in flight,
 * which is about 2 ms of copying. Writes the room's one report line to the log at level info. WAITS
 */
void kvs_room_close(uint64_t endpoint, uint64_t room, enum kvs_room_end end);

/* ---- both ---- */

/* In the child of a fork: drop the parent's state and descriptors. Async-signal-safe enough for pthread_atfork. */
void kvs_agent_after_fork_in_child(void);
void kvs_agent_before_fork(void);
void kvs_agent_after_fork_in_parent(void);

#endif
