/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory of endpoints and links: what the agent calls at registration, in the handshake and around pulls, and
 * how the other transports get bytes out of and into it. With host memory on this side every function here does what it
 * would without a GPU.
 */
#ifndef KVS_TRANSPORT_CUDA_LINK_H
#define KVS_TRANSPORT_CUDA_LINK_H

#include "cuda_engine.h"
#include "cuda_imports.h"
#include "link.h"

#define KVS_CUDA_ASK_MAX KVS_CONN_FD_MAX /* descriptors in one message */

struct kvs_cuda_link {
	/* Decode. */
	struct kvs_cuda_exports *offer;   /* the prefill's, until it is opened */
	struct kvs_text offer_text;       /* why there is none */
	struct kvs_cuda_imports *imports; /* NULL: not opened */
	uint64_t *sources;                /* addresses of a component's tensors; room for the largest */
	uint64_t asked;                   /* stream that waits for descriptors; 0: none */
	enum kvs_cuda_method method;
	struct kvs_text failed; /* not empty: they do not come, and why */
	/* Prefill. */
	uint64_t epoch; /* of the memory that was offered */
	/* Both. */
	struct kvs_cuda_engine engine; /* the agent's at a decode, the worker's in the stream at a prefill */
	uint64_t stream;               /* that the engine is in; 0: none */
};

/* Prefill, the agent, the lock held: the offer for the identity message; free its data. Empty: host memory. */
struct kvs_writer kvs_cuda_offer(struct kvs_link *link);

/*
 * Decode, the agent, the lock held: take the offer, before the route is chosen. False: out of memory. One that makes no
 * sense is kept as a reason.
 */
bool kvs_cuda_take_offer(struct kvs_link *link, const void *data, size_t size);

/*
 * Either end, the agent, the lock held, in the handshake: make what packing or unpacking for another transport needs.
 * False with text.
 */
bool kvs_cuda_open_linear(struct kvs_link *link, struct kvs_text *text);

/*
 * Prefill, the worker, no lock held: is the memory that a plan reads still what this link was told of? False with text;
 * *renewed_p: it is there, but other memory than before, so a new link will do.
 */
bool kvs_cuda_sources_same(struct kvs_link *link, const struct kvs_plan *plan, uint32_t component, bool *renewed_p,
                           struct kvs_text *text);

/* A message of ours? False: it is not, or (text) it makes no sense. The agent, the lock held. */
bool kvs_cuda_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body, struct kvs_text *text);

/* Let mappings go that nothing has used. Milliseconds until there may be more, -1: never. The agent, the lock held. */
int kvs_cuda_expire(uint64_t now_ns);

/* The link is being freed. The lock held. */
void kvs_cuda_free(struct kvs_link *link);

void kvs_cuda_after_fork_in_child(void);

/*
 * The next size bytes of a plan's stream, from registered memory on either kind of device to linear, and the other way.
 * cursor is the CPU's; stream tells one run from the next. False with text: the GPU failed. kvs_linear_put has them in
 * place when it returns, but for the end of a piece that the rest of the stream will complete.
 */
bool kvs_linear_get(struct kvs_link *link, const struct kvs_plan *plan, uint64_t stream, struct kvs_cursor *cursor,
                    void *linear_p, size_t size, struct kvs_text *text);
bool kvs_linear_put(struct kvs_link *link, struct kvs_sink *sink, const void *linear, size_t size,
                    struct kvs_text *text);

/* The run is over, whether it came to its end or not: nothing of it touches memory any more. */
void kvs_linear_end(struct kvs_link *link);

#endif
