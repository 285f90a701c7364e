/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a prefill offers of its device memory in the handshake: allocations with their sizes and, for legacy ones, their
 * IPC handles, and where in them each tensor lies. Addresses stay at home; a pull names items, nothing else. Mapped
 * memory is handed over later, as descriptors or, where its owner allows none, as fabric handles, and only when it is
 * needed, because every mapping of it keeps it alive.
 */
#ifndef KVS_TRANSPORT_CUDA_EXPORTS_H
#define KVS_TRANSPORT_CUDA_EXPORTS_H

#include "cuda_memory.h"
#include "wire.h"

struct kvs_cuda_export {
	enum kvs_cuda_kind kind; /* LEGACY, VMM or FABRIC */
	uint32_t extent;
	uint64_t size;
	uint64_t offset;                 /* in the extent */
	struct kvs_cu_ipc_handle handle; /* LEGACY */
};

struct kvs_cuda_export_place {
	uint32_t extent; /* KVS_CUDA_NO_EXTENT: the rank does not hold this tensor */
	uint64_t offset;
};

struct kvs_cuda_exports {
	struct kvs_cu_uuid uuid; /* of the GPU that it is on */
	struct kvs_text reason;  /* not empty: it cannot be shared, and why; the lists are empty then */
	uint32_t count;
	struct kvs_cuda_export *allocations; /* those of an extent follow each other */
	uint32_t extent_count;
	uint64_t *extent_sizes;
	uint32_t tensor_count;
	struct kvs_cuda_export_place *tensors; /* of all components, one after the other */
};

/* Write the offer. Never fails but for memory (writer->failed): what cannot be shared is offered as a reason. */
void kvs_cuda_exports_put(struct kvs_writer *writer, struct kvs_cuda_memory *memory);

/*
 * Read one, and check it against the layout that came with it: every tensor inside its extent. Owned by the caller;
 * NULL with text. Pure.
 */
struct kvs_cuda_exports *kvs_cuda_exports_get(const void *data, size_t size, const struct kvs_layout *layout,
                                              struct kvs_text *text);

/* NULL is accepted. */
void kvs_cuda_exports_free(struct kvs_cuda_exports *exports);

/* What another process maps an allocation from. */
struct kvs_cuda_shareable {
	int fd;                             /* VMM; -1: none */
	struct kvs_cu_fabric_handle fabric; /* FABRIC */
};

/* That of one of the prefill's mapped allocations; the descriptor is the caller's to close. False with text. Any
 * thread. */
bool kvs_cuda_export(struct kvs_cuda_memory *memory, uint32_t index, struct kvs_cuda_shareable *shareable_p,
                     struct kvs_text *text);

#endif
