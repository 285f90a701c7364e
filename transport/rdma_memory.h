/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An endpoint's memory, registered with a device: once per region, shared by all peers, in pieces no longer than the
 * device allows. A prefill's may be read by peers and nothing else; a decode's not even that.
 */
#ifndef KVS_TRANSPORT_RDMA_MEMORY_H
#define KVS_TRANSPORT_RDMA_MEMORY_H

#include "../policy/layout.h"
#include "rdma_gpu.h"

/* One registered piece; those of a set are sorted by address and do not overlap. */
struct kvs_rdma_piece {
	uint64_t address;
	uint64_t length;
	uint32_t key;          /* lkey here, rkey of a peer's */
	struct kvs_ibv_mr *mr; /* NULL: a peer's */
};

struct kvs_rdma_pieces {
	uint32_t count;
	struct kvs_rdma_piece *pieces; /* owned */
};

/*
 * Register all tensors of a layout. gpu: the memory that they are in, NULL: the host's. False with text (what, how
 * much, RLIMIT_MEMLOCK), and nothing stays. No lock held.
 */
bool kvs_rdma_register(struct kvs_rdma_device *device, const struct kvs_layout *layout, struct kvs_cuda_memory *gpu,
                       int access, struct kvs_rdma_pieces *pieces_p, struct kvs_text *text);

/* Undo it. */
void kvs_rdma_deregister(struct kvs_rdma_device *device, struct kvs_rdma_pieces *pieces);

/* The piece that holds this address, or NULL. O(log count); hint_p: the last answer, tried first. */
const struct kvs_rdma_piece *kvs_rdma_find(const struct kvs_rdma_pieces *pieces, uint64_t address, uint32_t *hint_p);

/* Text for a registration of so many bytes that failed with errno. */
void kvs_rdma_register_error(struct kvs_text *text, uint64_t address, uint64_t length, int error);

#endif
