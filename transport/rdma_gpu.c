/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "rdma_gpu.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A descriptor is of whole pages of the host. */
static uint64_t page_size(void)
{
	long size = sysconf(_SC_PAGESIZE);
	return size > 0 ? (uint64_t)size : 4096;
}

static bool get_attribute(const struct kvs_cuda_gpu *gpu, unsigned attribute, int *value_p, struct kvs_text *text)
{
	return kvs_cuda_call(gpu->cuda, text, DeviceGetAttribute, value_p, attribute, gpu->device);
}

bool kvs_rdma_gpu_ordered(const struct kvs_cuda_memory *memory, bool *flush_p, struct kvs_text *text)
{
	int order = 0, options = 0;
	*flush_p = false;
	if (!get_attribute(memory->gpu, KVS_CU_DEVICE_RDMA_ORDER, &order, text))
		return false;
	if (order >= KVS_CU_RDMA_ORDER_OWNER)
		return true;
	if (!get_attribute(memory->gpu, KVS_CU_DEVICE_RDMA_FLUSH, &options, text))
		return false;
	*flush_p = (options & KVS_CU_RDMA_FLUSH_HOST) != 0;
	if (!*flush_p)
		kvs_text_set(text, "the GPU does not see what network cards write in order, and the driver has no call "
		                   "to wait for it (cuFlushGPUDirectRDMAWrites)");
	return *flush_p;
}

bool kvs_rdma_gpu_flush(const struct kvs_cuda_memory *memory, struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	const struct kvs_cuda *cuda = memory->gpu->cuda;
	if (!kvs_cuda_enter(&scope, cuda, memory->gpu->context, text))
		return false;
	bool ok = kvs_cuda_call(cuda, text, FlushGPUDirectRDMAWrites, KVS_CU_RDMA_FLUSH_CONTEXT,
	                        KVS_CU_RDMA_FLUSH_TO_OWNER);
	kvs_cuda_leave(&scope);
	return ok;
}

uint64_t kvs_rdma_gpu_end(struct kvs_cuda_memory *memory, uint64_t address, struct kvs_text *text)
{
	uint64_t end = 0;
	pthread_mutex_lock(&memory->lock);
	int64_t at = kvs_cuda_memory_find(memory, address);
	const struct kvs_cuda_allocation *allocation = at < 0 ? NULL : &memory->allocations[at];
	if (allocation == NULL)
		kvs_text_set(text, "there is no GPU memory at 0x%" PRIx64 " any more", address);
	else if (allocation->kind == KVS_CUDA_MANAGED)
		/* A device would be given the pages that it has on the host just now. */
		kvs_text_set(text, "the GPU memory at 0x%" PRIx64 " is managed memory, which the driver moves",
		             address);
	else
		end = allocation->base + allocation->size;
	pthread_mutex_unlock(&memory->lock);
	return end;
}

static struct kvs_ibv_mr *by_descriptor(struct kvs_rdma_device *device, const struct kvs_cuda_memory *memory,
                                        uint64_t address, uint64_t length, int access, struct kvs_text *text)
{
	const struct kvs_cuda *cuda = memory->gpu->cuda;
	struct kvs_cuda_scope scope;
	uint64_t page = page_size(), first = address / page * page;
	uint64_t size = (address + length - first + page - 1) / page * page;
	int supported = 0, fd = -1;
	if (device->verbs->reg_dmabuf_mr == NULL) {
		kvs_text_set(text, "libibverbs has no ibv_reg_dmabuf_mr (version 1.12 has)");
		return NULL;
	}
	if (!get_attribute(memory->gpu, KVS_CU_DEVICE_DMA_BUF, &supported, text))
		return NULL;
	if (supported == 0) {
		kvs_text_set(text, "not with this GPU and driver (the open kernel modules have it)");
		return NULL;
	}
	if (!kvs_cuda_enter(&scope, cuda, memory->gpu->context, text))
		return NULL;
	bool exported = kvs_cuda_call(cuda, text, MemGetHandleForAddressRange, &fd, first, (size_t)size,
	                              KVS_CU_RANGE_DMA_BUF, 0);
	kvs_cuda_leave(&scope);
	if (!exported)
		return NULL;
	errno = EIO;
	struct kvs_ibv_mr *mr =
	        device->verbs->reg_dmabuf_mr(device->pd, address - first, (size_t)length, address, fd, access);
	if (mr == NULL)
		kvs_text_set(text, "ibv_reg_dmabuf_mr: %m");
	close(fd); /* the registration has a reference of its own */
	return mr;
}

struct kvs_ibv_mr *kvs_rdma_gpu_register(struct kvs_rdma_device *device, const struct kvs_cuda_memory *memory,
                                         uint64_t address, uint64_t length, int access, struct kvs_text *text)
{
	struct kvs_text why = {.s = ""};
	struct kvs_ibv_mr *mr = by_descriptor(device, memory, address, length, access, &why);
	if (mr != NULL)
		return mr;
	errno = EIO;
	mr = device->verbs->reg_mr(device->pd, (void *)(uintptr_t)address, (size_t)length, access);
	if (mr == NULL)
		kvs_text_set(text,
		             "cannot register %" PRIu64 " bytes of GPU memory at 0x%" PRIx64
		             ": dma-buf: %.160s; peer memory: %m (load nvidia_peermem)",
		             length, address, why.s);
	return mr;
}

int kvs_rdma_gpu_node(const struct kvs_cuda_memory *memory)
{
	int domain = 0, bus = 0, slot = 0;
	char path[96];
	struct kvs_text text;
	if (!get_attribute(memory->gpu, KVS_CU_DEVICE_PCI_DOMAIN, &domain, &text) ||
	    !get_attribute(memory->gpu, KVS_CU_DEVICE_PCI_BUS, &bus, &text) ||
	    !get_attribute(memory->gpu, KVS_CU_DEVICE_PCI_SLOT, &slot, &text))
		return -1;
	(void)snprintf(path, sizeof(path), "/sys/bus/pci/devices/%04x:%02x:%02x.0/numa_node", (unsigned)domain,
	               (unsigned)bus, (unsigned)slot);
	return kvs_rdma_node_in(path);
}
