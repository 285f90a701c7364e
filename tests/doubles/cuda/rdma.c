/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for other drivers: descriptors, and the order in which a network card's writes are seen. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "double.h"

#define PAGE 4096u

static int setting(const char *name, int otherwise)
{
	const char *value = getenv(name);
	return value == NULL ? otherwise : atoi(value);
}

int rdma_attribute(unsigned attribute)
{
	switch (attribute) {
	case KVS_CU_DEVICE_DMA_BUF:
		return setting("KVS_DOUBLE_CUDA_DMA_BUF", 1);
	case KVS_CU_DEVICE_RDMA_ORDER:
		return setting("KVS_DOUBLE_CUDA_RDMA_ORDER", KVS_CU_RDMA_ORDER_OWNER);
	case KVS_CU_DEVICE_RDMA_FLUSH:
		return setting("KVS_DOUBLE_CUDA_RDMA_FLUSH", KVS_CU_RDMA_FLUSH_HOST);
	default:
		return 0;
	}
}

/* The file's own position tells the double of libibverbs where in the allocation the range begins. */
unsigned cuMemGetHandleForAddressRange(void *handle_p, uint64_t pointer, size_t size, unsigned type,
                                       unsigned long long flags);
EXPORT unsigned cuMemGetHandleForAddressRange(void *handle_p, uint64_t pointer, size_t size, unsigned type,
                                              unsigned long long flags)
{
	ENTER(MemGetHandleForAddressRange);
	char path[64];
	if (current() == NULL)
		return INVALID_CONTEXT;
	if (type != KVS_CU_RANGE_DMA_BUF || flags != 0 || pointer % PAGE != 0 || size % PAGE != 0 || size == 0)
		return INVALID_VALUE;
	if (rdma_attribute(KVS_CU_DEVICE_DMA_BUF) == 0)
		return NOT_SUPPORTED;
	int fd = -1;
	pthread_rwlock_rdlock(&ranges_lock);
	struct range *range = range_find(pointer);
	size_t whole = range == NULL ? 0 : (range->size + PAGE - 1) / PAGE * PAGE;
	bool good = range != NULL && range->kind != RANGE_HOST && range->kind != RANGE_MANAGED &&
	            size <= whole - (pointer - range->base);
	if (good) {
		/* VMM: the handle's. A new description, so that the position is its own. */
		(void)snprintf(path, sizeof(path), "/proc/self/fd/%d",
		               range->kind == RANGE_VMM ? range->handle->fd : range->fd);
		fd = open(path, O_RDWR | O_CLOEXEC);
		if (fd >= 0)
			(void)lseek(fd, (off_t)(pointer - range->base), SEEK_SET);
	}
	pthread_rwlock_unlock(&ranges_lock);
	if (fd < 0)
		return good ? OUT_OF_MEMORY : INVALID_VALUE;
	*(int *)handle_p = fd;
	return OK;
}

unsigned cuFlushGPUDirectRDMAWrites(unsigned target, unsigned scope);
EXPORT unsigned cuFlushGPUDirectRDMAWrites(unsigned target, unsigned scope)
{
	ENTER(FlushGPUDirectRDMAWrites);
	if (current() == NULL)
		return INVALID_CONTEXT;
	if (target != KVS_CU_RDMA_FLUSH_CONTEXT || scope < KVS_CU_RDMA_FLUSH_TO_OWNER)
		return INVALID_VALUE;
	return (rdma_attribute(KVS_CU_DEVICE_RDMA_FLUSH) & KVS_CU_RDMA_FLUSH_HOST) != 0 ? OK : NOT_SUPPORTED;
}
