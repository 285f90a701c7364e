/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A GPU as this process uses it: the context that the server's memory lives in, and the copy kernel loaded there. Made
 * when memory is registered, shared by all that follows. No context is ever created: where memory has none of its own,
 * the device's primary one is used, and only if the server has made it active.
 */
#ifndef KVS_TRANSPORT_CUDA_GPU_H
#define KVS_TRANSPORT_CUDA_GPU_H

#include "cuda_driver.h"

struct kvs_cuda_gpu {
	struct kvs_cuda_gpu *next;
	uint32_t refs;
	const struct kvs_cuda *cuda;
	kvs_cu_device device;
	kvs_cu_context context;
	bool retained; /* the primary context: to be released */
	struct kvs_cu_uuid uuid;
	int multiprocessors;
	uint64_t max_pitch; /* of a 2-D copy, bytes */
	kvs_cu_module module;
	kvs_cu_function copy; /* the kernel */
};

/*
 * The GPU and context of a device address; a reference for the caller (kvs_cuda_gpu_put). NULL with text: no active
 * context, or the driver's error. Any thread; takes a lock of its own.
 */
struct kvs_cuda_gpu *kvs_cuda_gpu_of(const struct kvs_cuda *cuda, uint64_t address, struct kvs_text *text);

/* One more reference. Any thread. */
void kvs_cuda_gpu_ref(struct kvs_cuda_gpu *gpu);

/* NULL is accepted. The last reference unloads the kernel. */
void kvs_cuda_gpu_put(struct kvs_cuda_gpu *gpu);

/* In the child of a fork: forget all of them, without the driver, which is of no use there. */
void kvs_cuda_gpu_after_fork_in_child(void);

/* Ordinal of the visible device with this UUID, or -1. Any thread. */
kvs_cu_device kvs_cuda_device_by_uuid(const struct kvs_cuda *cuda, const struct kvs_cu_uuid *uuid);

#endif
