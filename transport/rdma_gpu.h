/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GPU memory and RDMA devices. A device reads and writes it through a descriptor of the CUDA driver's (dma-buf), else
 * through the kernel module that lets it take GPU addresses (peer memory); where neither is there the reason says so.
 */
#ifndef KVS_TRANSPORT_RDMA_GPU_H
#define KVS_TRANSPORT_RDMA_GPU_H

#include "cuda_memory.h"
#include "rdma_device.h"

/*
 * Can a device write into this memory so that the GPU sees it in time? *flush_p: kvs_rdma_gpu_flush has to be called
 * after the last write. False with text: neither by itself nor that way. Any thread, no lock held.
 */
bool kvs_rdma_gpu_ordered(const struct kvs_cuda_memory *memory, bool *flush_p, struct kvs_text *text);

/* What devices have written is seen by the GPU's kernels from here on. False with text. Any thread, no lock held. */
bool kvs_rdma_gpu_flush(const struct kvs_cuda_memory *memory, struct kvs_text *text);

/*
 * Where the allocation that holds this address ends: a registration does not cross it. 0 with text: it is not there, or
 * it is managed memory, which the driver moves. Any thread.
 */
uint64_t kvs_rdma_gpu_end(struct kvs_cuda_memory *memory, uint64_t address, struct kvs_text *text);

/* Register a range within one allocation; the caller deregisters it. NULL with text. Any thread, no lock held. */
struct kvs_ibv_mr *kvs_rdma_gpu_register(struct kvs_rdma_device *device, const struct kvs_cuda_memory *memory,
                                         uint64_t address, uint64_t length, int access, struct kvs_text *text);

/* The node of the GPU; -1: unknown. Any thread. */
int kvs_rdma_gpu_node(const struct kvs_cuda_memory *memory);

#endif
