/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rdma transport of one link. The decode makes a reliable-connected queue pair, tells the prefill over the control
 * connection, and READs: whole source items straight to their strided places through the scatter list (direct), or,
 * where the source is in short slices, pieces that the prefill's worker packs into registered slots on request.
 *
 * Making and registering takes the setup thread; READs are issued and collected by the agent thread. A broken pair is
 * made again, at most KVS_RDMA_FAILURES times in a row.
 */
#ifndef KVS_TRANSPORT_RDMA_H
#define KVS_TRANSPORT_RDMA_H

#include "link.h"
#include "rdma_pair.h"
#include "rdma_wire.h"

#define KVS_RDMA_FAILURES  3
#define KVS_RDMA_SLOT_SIZE (256u << 10)
#define KVS_RDMA_SLOTS     64u

/* An endpoint's memory as registered with one device, shared by its links. The lock held. */
struct kvs_rdma_memory {
	struct kvs_rdma_memory *next;
	uint64_t endpoint;
	struct kvs_rdma_device *device;
	uint32_t refs; /* links, and the endpoint until it is removed */
	bool removed;
	bool registered;
	bool flush;                    /* GPU memory, a decode's: after the last READ */
	uint64_t epoch;                /* of the GPU memory that is registered; another one is other memory */
	struct kvs_rdma_pieces pieces; /* constant once registered */
};

enum kvs_rdma_state {
	KVS_RDMA_SETUP,    /* being made here or at the prefill */
	KVS_RDMA_UP,       /* decode: READs may be issued */
	KVS_RDMA_BROKEN,   /* decode: to be made again */
	KVS_RDMA_GIVEN_UP, /* text says why */
};

/* A posted READ. */
struct kvs_rdma_read {
	uint64_t address; /* at the prefill */
	uint64_t bytes;
};

/* Decode: the stream that is being read. The agent thread's own. */
struct kvs_rdma_reader {
	uint64_t stream; /* 0: none */
	bool packed;
	struct kvs_plan_iter iter;
	struct kvs_run run; /* what is left of the current one */
	uint64_t issued;    /* bytes */
	uint64_t posted;    /* READs in all; the last one's number */
	uint64_t first;     /* posted when the stream began */
	uint64_t retired;   /* of them completed */
	uint64_t in_flight; /* bytes */
	uint64_t moved_ns;  /* when a READ was last posted or completed */
	uint64_t stall_ns;  /* the longest wait for a completion */
	uint64_t packed_pieces;
	uint64_t credit; /* pieces that were asked for */
	uint32_t local_hint, remote_hint;
	struct kvs_rdma_read reads[KVS_RDMA_DEPTH];
	struct kvs_text error; /* the pair is of no more use; empty: it is well */
	bool has_early;        /* a completion that was seen while waiting */
	struct kvs_ibv_wc early;
};

struct kvs_rdma {
	_Atomic enum kvs_rdma_state state;
	struct kvs_text text;
	uint64_t attempt;
	uint32_t failures; /* in a row */
	struct kvs_rdma_offer local;
	struct kvs_rdma_offer remote;   /* decode */
	struct kvs_rdma_match match;    /* decode */
	struct kvs_rdma_memory *memory; /* a reference */
	struct kvs_rdma_pair pair;

	/* Decode: what the prefill may be read of, changed by the setup thread while the state is SETUP. */
	struct kvs_rdma_ready ready;
	uint32_t *tensor_first; /* by component: index of its first tensor in ready.tensors */
	struct kvs_rdma_reader reader;

	/* Prefill: the slots, from the first connect message to the end of the link. */
	uint8_t *slots;
	uint32_t slot_count;
	struct kvs_ibv_mr *slots_mr;
	/* Prefill: what the decode last asked for. */
	struct kvs_rdma_credit credit;
};

/* ---- rdma.c: what the agent calls, with the lock held ---- */

/* Prefill, for its identity message. */
void kvs_rdma_offer(const struct kvs_link *link, struct kvs_rdma_offer *offer_p);
/* Decode, what came in that message; false: out of memory. */
bool kvs_rdma_take_offer(struct kvs_link *link, const struct kvs_rdma_offer *offer);
/* A message of ours; false with text: not one that has a place here. */
bool kvs_rdma_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body, struct kvs_text *text);
/* The completion channel has something. */
void kvs_rdma_event(struct kvs_link *link);
/* The link is being freed: what it has goes to the setup thread. */
void kvs_rdma_free(struct kvs_link *link);

/* ---- rdma_setup.c ---- */

/* Is what is registered for it no longer the endpoint's memory, as the owner has put other GPU memory there? */
bool kvs_rdma_is_stale(const struct kvs_link *link);
/* Have the setup thread make the pair, decode; the lock held. */
void kvs_rdma_begin(struct kvs_link *link);
/* Have it answer a connect message, prefill; go on with a ready message, decode, which is taken over. The lock held. */
void kvs_rdma_accept(struct kvs_link *link, const struct kvs_rdma_connect *msg);
void kvs_rdma_finish(struct kvs_link *link, struct kvs_rdma_ready *msg);
/* Have it destroy a link's pair, slots and reference to the memory; takes over rdma. The lock held. */
void kvs_rdma_discard(struct kvs_rdma *rdma);
/* Decode: the pair is of no more use; made again, or given up. The lock held. */
void kvs_rdma_broken(struct kvs_link *link, const char *text);
/* The endpoint is removed: waits until its memory is registered no more. The lock held, released while waiting. */
void kvs_rdma_forget_endpoint(uint64_t endpoint);
/* The agent has ended: wait for the setup thread, close the devices. */
void kvs_rdma_stop(void);
/* In the child of a fork, before the links are forgotten. */
void kvs_rdma_after_fork_in_child(void);

/* Where the configuration wants rdma among the link's transports, or behind all of them. The lock held. */
void kvs_rdma_place(struct kvs_link *link, bool usable);
/* Decode: not over rdma until the peer connects anew; text says why. The lock held. */
void kvs_rdma_give_up(struct kvs_link *link, const char *text);

/* ---- rdma_connect.c: the setup thread, the lock held, released meanwhile; the link is still wanted ---- */

void kvs_rdma_do_begin(struct kvs_link *link);
void kvs_rdma_do_accept(struct kvs_link *link, const struct kvs_rdma_connect *msg);
void kvs_rdma_do_finish(struct kvs_link *link, struct kvs_rdma_ready *msg);

/* ---- rdma_share.c, the lock held ---- */

/* The endpoint's set for a device; one reference is the caller's. NULL: out of memory. */
struct kvs_rdma_memory *kvs_rdma_memory_get(const struct kvs_endpoint *endpoint, struct kvs_rdma_device *device);
/* NULL is accepted. */
void kvs_rdma_memory_put(struct kvs_rdma_memory *memory);
/* The endpoint has no more use for it, or for any of its sets. */
void kvs_rdma_memory_remove(struct kvs_rdma_memory *memory);
void kvs_rdma_memory_remove_all(uint64_t endpoint);
bool kvs_rdma_memory_has(uint64_t endpoint);
/* Deregister what nobody refers to. The setup thread; the lock is released meanwhile. */
void kvs_rdma_memory_release(void);
/* In the child of a fork. */
void kvs_rdma_memory_forget(void);

/* ---- rdma_read.c: the agent thread, no lock held ---- */

/* Bytes of a direct READ, in the mean, below which slices are packed (docs/rdma.md has the figures). Tests change it.
 */
extern uint32_t kvs_rdma_direct_min;

/* Is this plan read in packed pieces? */
bool kvs_rdma_packs(const struct kvs_plan *plan, uint32_t sge, uint32_t slot_size);
enum kvs_step kvs_rdma_read_more(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text);
/* READs that are not completed. */
uint32_t kvs_rdma_outstanding(const struct kvs_rdma *rdma);
/* Is there a completion? */
bool kvs_rdma_peek(struct kvs_rdma *rdma);

#endif
