/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decode's view of a prefill's device memory. Legacy allocations are opened once per process and closed with the
 * last link that uses them. Mapped memory is mapped when a pull needs it, read-only where the driver can, and let go
 * once nothing has used it for a second: as long as it is mapped here, an owner that pauses keeps its pages.
 *
 * One thread at a time, the agent's, but for kvs_cuda_imports_free; the context is pushed inside.
 */
#ifndef KVS_TRANSPORT_CUDA_IMPORTS_H
#define KVS_TRANSPORT_CUDA_IMPORTS_H

#include "cuda_exports.h"

#define KVS_CUDA_IDLE_NS 1000000000u

struct kvs_cuda_import {
	uint64_t base;    /* where it is mapped; 0: it is not */
	uint64_t used_ns; /* when a pull last needed it */
};

struct kvs_cuda_imports {
	struct kvs_cuda_exports *exports; /* owned */
	const struct kvs_layout *layout;  /* the prefill's; constant */
	struct kvs_cuda_gpu *gpu;         /* ours: where it is mapped; a reference */
	struct kvs_cuda_import *allocations;
	uint64_t *extents; /* base of each; 0: nothing of it was mapped yet */
	uint32_t mapped;   /* allocations of the mapped kinds that are */
};

/*
 * Open what can be opened at once. Takes over exports, also when it fails: not reachable from this GPU (text names both
 * by UUID), or the driver's error.
 */
struct kvs_cuda_imports *kvs_cuda_imports_new(struct kvs_cuda_exports *exports, const struct kvs_layout *layout,
                                              struct kvs_cuda_gpu *gpu, struct kvs_text *text);

/* Unmap and close everything. NULL is accepted. The agent's lock held. */
void kvs_cuda_imports_free(struct kvs_cuda_imports *imports);

/*
 * Which allocations does a plan need that are not mapped? At most limit of them are listed; returns how many were. All
 * that it needs count as used at now_ns.
 */
uint32_t kvs_cuda_imports_missing(struct kvs_cuda_imports *imports, const struct kvs_plan *plan, uint32_t component,
                                  uint64_t now_ns, uint32_t *list_p, uint32_t limit);

/* Is this allocation passed as a descriptor? False for any other, and for an index that there is not. */
bool kvs_cuda_imports_by_fd(const struct kvs_cuda_imports *imports, uint32_t index);

/* Map an allocation from what it was passed as, which stays the caller's. False with text. */
bool kvs_cuda_imports_map(struct kvs_cuda_imports *imports, uint32_t index, const struct kvs_cuda_shareable *shareable,
                          struct kvs_text *text);

/* Address here of each tensor of a component; tensors that are not held are 0. */
void kvs_cuda_imports_sources(const struct kvs_cuda_imports *imports, uint32_t component, uint64_t *sources_p);

/* Unmap what was not used since KVS_CUDA_IDLE_NS. Returns milliseconds until there may be more, -1: never. */
int kvs_cuda_imports_expire(struct kvs_cuda_imports *imports, uint64_t now_ns);

/* In the child of a fork. */
void kvs_cuda_imports_after_fork_in_child(void);

#endif
