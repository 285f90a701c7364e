/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered device memory: which allocations hold it, what each of them is, and whether it still is what it was. An
 * owner may free it, or put other pages at the same address (a paused and resumed server does), and only the owner's
 * driver can tell; so each side asks for its own memory before it is used and again afterwards.
 */
#ifndef KVS_TRANSPORT_CUDA_MEMORY_H
#define KVS_TRANSPORT_CUDA_MEMORY_H

#include <pthread.h>

#include "../policy/plan.h"
#include "copy.h"
#include "cuda_gpu.h"

#define KVS_CUDA_ALLOCATIONS_MAX 65536u
#define KVS_CUDA_NO_EXTENT       UINT32_MAX /* a tensor that this rank does not hold */

/* Kind (its number is on the wire), name, why it cannot be shared with another process, and the remedy. */
#define KVS_CUDA_KINDS(X) \
	X(LEGACY, 1, "cuMemAlloc", NULL) \
	X(VMM, 2, "mapped (POSIX descriptor)", NULL) \
	X(FABRIC, 3, "mapped (fabric handle)", NULL) \
	X(PRIVATE, 4, "mapped (not exportable)", \
	  "it was mapped without a handle type that can be exported; " \
	  "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False " \
	  "makes it shareable") \
	X(POOL, 5, "stream-ordered pool", \
	  "it is from a stream-ordered pool; PYTORCH_CUDA_ALLOC_CONF=backend:native makes it shareable") \
	X(MANAGED, 6, "managed", "it is managed memory, which has no handle for another process")

enum kvs_cuda_kind {
	KVS_CUDA_HOST = 0, /* not device memory at all */
#define X(kind, number, name, reason) KVS_CUDA_##kind = (number),
	KVS_CUDA_KINDS(X)
#undef X
};

/* Mapped memory that is handed over piece by piece, as a descriptor or a fabric handle. */
static inline bool kvs_cuda_kind_mapped(enum kvs_cuda_kind kind)
{
	return kind == KVS_CUDA_VMM || kind == KVS_CUDA_FABRIC;
}

/* "stream-ordered pool" */
const char *kvs_cuda_kind_name(enum kvs_cuda_kind kind);

struct kvs_cuda_allocation {
	uint64_t base;
	uint64_t size;
	enum kvs_cuda_kind kind;
	uint32_t extent;    /* allocations that follow each other without a gap are one */
	uint64_t buffer_id; /* the driver's, never used twice in a process */
	uint64_t block_id;
	uint64_t handle;  /* of mapped memory: compared, never used */
	uint64_t checked; /* stamp of the check that looked at it last */
};

struct kvs_cuda_memory {
	pthread_mutex_t lock;            /* guards all below; held during calls of the driver */
	struct kvs_cuda_gpu *gpu;        /* constant */
	const struct kvs_layout *layout; /* constant, the endpoint's */
	uint32_t count;
	uint32_t capacity;
	struct kvs_cuda_allocation *allocations; /* by address */
	uint64_t epoch;                          /* grows when the memory was found to have changed */
	uint64_t stamp;
};

/*
 * Look at all memory of a layout, which must outlive the result. True with *memory_p NULL: it is host memory. False
 * with text: on more than one GPU, partly on one, not allocated to its end, or the driver's error. Loads the copy
 * kernel on that GPU. Any thread.
 */
bool kvs_cuda_memory_new(const struct kvs_layout *layout, struct kvs_cuda_memory **memory_p, struct kvs_text *text);

/* NULL is accepted. */
void kvs_cuda_memory_free(struct kvs_cuda_memory *memory);

/* Why another process cannot map it; false: it can. Any thread. */
bool kvs_cuda_memory_private(struct kvs_cuda_memory *memory, struct kvs_text *reason_p);

/*
 * Is the memory that one side of a plan touches still what was registered? False with text. Any thread; NULL memory is
 * always good.
 */
bool kvs_cuda_memory_check(struct kvs_cuda_memory *memory, const struct kvs_plan *plan, enum kvs_side side,
                           uint32_t component, struct kvs_text *text);

/* The same for these items of every tensor of a component. */
bool kvs_cuda_memory_check_items(struct kvs_cuda_memory *memory, uint32_t component, const int32_t *items,
                                 uint32_t count, struct kvs_text *text);

/*
 * Look at it all again after a check has failed: what is there now is what counts from here on. False with text: it is
 * not all there (paused, freed), and what was known stays. Any thread.
 */
bool kvs_cuda_memory_renew(struct kvs_cuda_memory *memory, struct kvs_text *text);

/* The same, if any of it has changed. */
bool kvs_cuda_memory_renew_if_changed(struct kvs_cuda_memory *memory, struct kvs_text *text);

/* Grows with each renewal. Any thread; NULL memory: 0. */
uint64_t kvs_cuda_memory_epoch(struct kvs_cuda_memory *memory);

/* Index of the allocation that holds this address, or -1. memory->lock held. */
int64_t kvs_cuda_memory_find(const struct kvs_cuda_memory *memory, uint64_t address);

/* Is this one still what it was? False with text. memory->lock held, memory->gpu's context current. */
bool kvs_cuda_allocation_same(const struct kvs_cuda_memory *memory, const struct kvs_cuda_allocation *allocation,
                              struct kvs_text *text);

#endif
