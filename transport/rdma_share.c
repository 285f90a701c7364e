/* SPDX-License-Identifier: Apache-2.0 */
/* What is registered of each endpoint, shared by its links. The lock held. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "rdma.h"

static struct kvs_rdma_memory *memories;

void kvs_rdma_memory_remove(struct kvs_rdma_memory *memory)
{
	if (memory->removed)
		return;
	memory->removed = true;
	memory->refs--;
}

struct kvs_rdma_memory *kvs_rdma_memory_get(const struct kvs_endpoint *endpoint, struct kvs_rdma_device *device)
{
	uint64_t epoch = kvs_cuda_memory_epoch(endpoint->cuda);
	struct kvs_rdma_memory *memory = memories;
	while (memory != NULL && (memory->endpoint != endpoint->id || memory->device != device || memory->removed ||
	                          memory->epoch != epoch)) {
		if (memory->endpoint == endpoint->id && memory->epoch != epoch)
			kvs_rdma_memory_remove(memory);
		memory = memory->next;
	}
	if (memory == NULL) {
		memory = calloc(1, sizeof(*memory));
		if (memory == NULL)
			return NULL;
		memory->endpoint = endpoint->id;
		memory->device = device;
		memory->epoch = epoch;
		memory->refs = 1;
		memory->next = memories;
		memories = memory;
	}
	memory->refs++;
	return memory;
}

void kvs_rdma_memory_release(void)
{
	struct kvs_rdma_memory **at = &memories;
	while (*at != NULL) {
		struct kvs_rdma_memory *memory = *at;
		if (memory->refs > 0) {
			at = &memory->next;
			continue;
		}
		/* It stays in the list, for kvs_rdma_forget_endpoint waits for it; only this thread takes it out. */
		kvs_unlock();
		kvs_rdma_deregister(memory->device, &memory->pieces);
		kvs_lock();
		at = &memories;
		while (*at != memory)
			at = &(*at)->next;
		*at = memory->next;
		free(memory);
		pthread_cond_broadcast(&kvs_state.changed);
		at = &memories;
	}
}

void kvs_rdma_memory_put(struct kvs_rdma_memory *memory)
{
	if (memory != NULL)
		memory->refs--;
}

bool kvs_rdma_memory_has(uint64_t endpoint)
{
	for (const struct kvs_rdma_memory *memory = memories; memory != NULL; memory = memory->next) {
		if (memory->endpoint == endpoint)
			return true;
	}
	return false;
}

void kvs_rdma_memory_remove_all(uint64_t endpoint)
{
	for (struct kvs_rdma_memory *memory = memories; memory != NULL; memory = memory->next) {
		if (memory->endpoint == endpoint)
			kvs_rdma_memory_remove(memory);
	}
}

void kvs_rdma_memory_forget(void)
{
	memories = NULL;
}
