/* SPDX-License-Identifier: Apache-2.0 */
/* What the GPU can reach: ranges of device addresses, and the shared memory behind them. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "double.h"

#define RANGES 16384

pthread_rwlock_t ranges_lock = PTHREAD_RWLOCK_INITIALIZER;
bool host_access;
static struct range *ranges[RANGES]; /* by base */
static int range_count;
static _Atomic uint64_t last_id;

uint64_t next_id(void)
{
	return atomic_fetch_add(&last_id, 1) + 1;
}

/* The last one that begins at or before the address. */
static int place(uint64_t address)
{
	int low = 0, high = range_count;
	while (low < high) {
		int middle = low + (high - low) / 2;
		if (ranges[middle]->base <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low - 1;
}

struct range *range_find(uint64_t address)
{
	int i = place(address);
	return i >= 0 && address - ranges[i]->base < ranges[i]->size ? ranges[i] : NULL;
}

struct range *range_after(uint64_t address)
{
	int i = address == 0 ? 0 : place(address - 1) + 1;
	return i < range_count ? ranges[i] : NULL;
}

struct range *range_add(const struct range *range)
{
	struct range *made = range_count < RANGES ? malloc(sizeof(*made)) : NULL;
	if (made == NULL)
		return NULL;
	memcpy(made, range, sizeof(*made));
	int at = place(range->base) + 1;
	memmove(&ranges[at + 1], &ranges[at], (size_t)(range_count - at) * sizeof(ranges[0]));
	ranges[at] = made;
	range_count++;
	return made;
}

void range_remove(struct range *range)
{
	int at = place(range->base);
	if (at < 0 || ranges[at] != range)
		return;
	memmove(&ranges[at], &ranges[at + 1], (size_t)(range_count - at - 1) * sizeof(ranges[0]));
	range_count--;
	free(range);
}

int live_ranges(enum range_kind kind, bool opens)
{
	int sum = 0;
	pthread_rwlock_rdlock(&ranges_lock);
	for (int i = 0; i < range_count; i++) {
		if (ranges[i]->kind == kind)
			sum += opens ? ranges[i]->opens : 1;
	}
	pthread_rwlock_unlock(&ranges_lock);
	return sum;
}

int memory_make(size_t size)
{
	char name[64];
	(void)snprintf(name, sizeof(name), NAME_PREFIX "%llu", (unsigned long long)next_id());
	int fd = memfd_create(name, MFD_CLOEXEC);
	if (fd >= 0 && ftruncate(fd, (off_t)size) != 0) {
		close(fd);
		fd = -1;
	}
	return fd;
}

bool memory_show(struct range *range, int protection)
{
	bool reserved = range->base != 0;
	void *want = (void *)(uintptr_t)range->base;
	int fixed = reserved ? MAP_FIXED : 0;
	if (host_access) {
		range->memory = mmap(want, range->size, protection, MAP_SHARED | fixed, range->fd, 0);
		range->base = (uintptr_t)range->memory;
		return range->memory != MAP_FAILED;
	}
	range->memory = mmap(NULL, range->size, protection, MAP_SHARED, range->fd, 0);
	if (range->memory == MAP_FAILED)
		return false;
	if (reserved)
		return true;
	/* Addresses of the device: the CPU that uses one dies, as it should. */
	void *base = mmap(NULL, range->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	range->base = (uintptr_t)base;
	return base != MAP_FAILED;
}

void memory_hide(struct range *range)
{
	void *base = (void *)(uintptr_t)range->base;
	if (range->kind == RANGE_VMM) {
		if (host_access)
			(void)mmap(base, range->size, PROT_NONE,
			           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
		else
			(void)munmap(range->memory, range->size);
		return;
	}
	if ((uintptr_t)range->memory != range->base)
		(void)munmap(base, range->size);
	(void)munmap(range->memory, range->size);
}

uint8_t *reach(uint64_t address, size_t size, int device, bool write)
{
	struct range *range = range_find(address);
	if (range == NULL || size > range->size - (address - range->base))
		return NULL;
	if (range->kind == RANGE_VMM) {
		if (range->access_device != device || range->access == 0 ||
		    (write && range->access != KVS_CU_ACCESS_READWRITE))
			return NULL;
	} else if (range->kind != RANGE_HOST && !peers(device, range->device)) {
		return NULL;
	}
	if (write)
		atomic_fetch_add_explicit(&range->writes, 1, memory_order_relaxed);
	return range->memory + (address - range->base);
}

EXPORT uint64_t kvs_double_cuda_writes(uint64_t address)
{
	pthread_rwlock_rdlock(&ranges_lock);
	struct range *range = range_find(address);
	uint64_t writes = range == NULL ? 0 : range->writes;
	pthread_rwlock_unlock(&ranges_lock);
	return writes;
}
