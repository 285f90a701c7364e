/* SPDX-License-Identifier: Apache-2.0 */
/* Physical allocations and their mappings. A handle is the address of its object, so it may come again once freed. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "double.h"

#define RESERVATIONS 4096

static struct {
	uint64_t base;
	size_t size;
} reservations[RESERVATIONS];

static int held; /* references to handles, under ranges_lock like all of this */

int live_handles(void)
{
	return held;
}

int live_reservations(void)
{
	int sum = 0;
	for (int i = 0; i < RESERVATIONS; i++)
		sum += reservations[i].size != 0;
	return sum;
}

static struct handle *of(uint64_t handle)
{
	return (struct handle *)(uintptr_t)handle;
}

static void unref(struct handle *handle)
{
	if (--handle->refs > 0)
		return;
	close(handle->fd);
	free(handle);
}

unsigned cuMemGetAllocationGranularity(size_t *size_p, const struct kvs_cu_allocation_prop *prop, unsigned option);
EXPORT unsigned cuMemGetAllocationGranularity(size_t *size_p, const struct kvs_cu_allocation_prop *prop,
                                              unsigned option)
{
	ENTER(MemGetAllocationGranularity);
	(void)prop;
	(void)option;
	*size_p = GRANULARITY;
	return OK;
}

static unsigned make(uint64_t *handle_p, int fd, size_t size, int device, unsigned types)
{
	struct handle *made = fd < 0 ? NULL : malloc(sizeof(*made));
	if (made == NULL) {
		if (fd >= 0)
			close(fd);
		return OUT_OF_MEMORY;
	}
	*made = (struct handle){
	        .refs = 1, .held = 1, .fd = fd, .size = size, .device = device, .types = types, .block_id = next_id()};
	held++;
	*handle_p = (uintptr_t)made;
	return OK;
}

unsigned cuMemCreate(uint64_t *handle_p, size_t size, const struct kvs_cu_allocation_prop *prop, uint64_t flags);
EXPORT unsigned cuMemCreate(uint64_t *handle_p, size_t size, const struct kvs_cu_allocation_prop *prop, uint64_t flags)
{
	ENTER(MemCreate);
	if (size == 0 || size % GRANULARITY != 0 || flags != 0)
		return INVALID_VALUE;
	pthread_rwlock_wrlock(&ranges_lock);
	unsigned result = make(handle_p, memory_make(size), size, prop->location.id, prop->handle_types);
	pthread_rwlock_unlock(&ranges_lock);
	return result;
}

unsigned cuMemRelease(uint64_t handle);
EXPORT unsigned cuMemRelease(uint64_t handle)
{
	ENTER(MemRelease);
	pthread_rwlock_wrlock(&ranges_lock);
	bool good = handle != 0 && of(handle)->held > 0;
	if (good) {
		of(handle)->held--;
		held--;
		unref(of(handle));
	}
	pthread_rwlock_unlock(&ranges_lock);
	return good ? OK : INVALID_VALUE;
}

unsigned cuMemRetainAllocationHandle(uint64_t *handle_p, void *address);
EXPORT unsigned cuMemRetainAllocationHandle(uint64_t *handle_p, void *address)
{
	ENTER(MemRetainAllocationHandle);
	pthread_rwlock_wrlock(&ranges_lock);
	const struct range *range = range_find((uintptr_t)address);
	bool good = range != NULL && range->kind == RANGE_VMM;
	if (good) {
		range->handle->refs++;
		range->handle->held++;
		held++;
		*handle_p = (uintptr_t)range->handle;
	}
	pthread_rwlock_unlock(&ranges_lock);
	return good ? OK : INVALID_VALUE;
}

unsigned cuMemGetAllocationPropertiesFromHandle(struct kvs_cu_allocation_prop *prop_p, uint64_t handle);
EXPORT unsigned cuMemGetAllocationPropertiesFromHandle(struct kvs_cu_allocation_prop *prop_p, uint64_t handle)
{
	ENTER(MemGetAllocationPropertiesFromHandle);
	*prop_p = (struct kvs_cu_allocation_prop){.type = KVS_CU_ALLOCATION_PINNED,
	                                          .handle_types = of(handle)->types,
	                                          .location = {KVS_CU_LOCATION_DEVICE, of(handle)->device}};
	return OK;
}

/* Inside a struct kvs_cu_fabric_handle: it works between any two processes that may look into each other. */
struct fabric {
	uint32_t magic;
	int32_t pid;
	int32_t fd;
	uint32_t unused;
	uint64_t device; /* of the file behind fd */
	uint64_t inode;
};

_Static_assert(sizeof(struct fabric) <= KVS_CU_FABRIC_SIZE, "a fabric handle holds it");

#define FABRIC_MAGIC 0x42414645u

unsigned cuMemExportToShareableHandle(void *shareable_p, uint64_t handle, unsigned type, uint64_t flags);
EXPORT unsigned cuMemExportToShareableHandle(void *shareable_p, uint64_t handle, unsigned type, uint64_t flags)
{
	struct stat st;
	ENTER(MemExportToShareableHandle);
	(void)flags;
	if ((type != KVS_CU_HANDLE_POSIX_FD && type != KVS_CU_HANDLE_FABRIC) || (of(handle)->types & type) == 0)
		return INVALID_VALUE;
	if (type == KVS_CU_HANDLE_FABRIC) {
		if (fstat(of(handle)->fd, &st) != 0)
			return NOT_PERMITTED;
		struct fabric fabric = {.magic = FABRIC_MAGIC,
		                        .pid = getpid(),
		                        .fd = of(handle)->fd,
		                        .device = st.st_dev,
		                        .inode = st.st_ino};
		memset(shareable_p, 0, KVS_CU_FABRIC_SIZE);
		memcpy(shareable_p, &fabric, sizeof(fabric));
		return OK;
	}
	int fd = fcntl(of(handle)->fd, F_DUPFD_CLOEXEC, 0);
	memcpy(shareable_p, &fd, sizeof(fd));
	return fd >= 0 ? OK : OUT_OF_MEMORY;
}

/* A descriptor of our own, or -1. */
static int from_fabric(const void *shareable)
{
	struct fabric fabric;
	struct stat st;
	char path[64];
	memcpy(&fabric, shareable, sizeof(fabric));
	if (fabric.magic != FABRIC_MAGIC)
		return -1;
	(void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", fabric.pid, fabric.fd);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	/* Freed meanwhile, or the descriptor is another allocation's now. */
	if (fd >= 0 && (fstat(fd, &st) != 0 || st.st_dev != fabric.device || st.st_ino != fabric.inode)) {
		close(fd);
		return -1;
	}
	return fd;
}

unsigned cuMemImportFromShareableHandle(uint64_t *handle_p, void *shareable, unsigned type);
EXPORT unsigned cuMemImportFromShareableHandle(uint64_t *handle_p, void *shareable, unsigned type)
{
	struct stat st;
	ENTER(MemImportFromShareableHandle);
	if (type != KVS_CU_HANDLE_POSIX_FD && type != KVS_CU_HANDLE_FABRIC)
		return INVALID_VALUE;
	int fd = type == KVS_CU_HANDLE_FABRIC ? from_fabric(shareable)
	                                      : fcntl((int)(uintptr_t)shareable, F_DUPFD_CLOEXEC, 0);
	if (fd < 0 || fstat(fd, &st) != 0 || st.st_size == 0 || st.st_size % GRANULARITY != 0) {
		if (fd >= 0)
			close(fd);
		return INVALID_VALUE;
	}
	pthread_rwlock_wrlock(&ranges_lock);
	unsigned result = make(handle_p, fd, (size_t)st.st_size, 0, type);
	pthread_rwlock_unlock(&ranges_lock);
	return result;
}

unsigned cuMemAddressReserve(uint64_t *pointer_p, size_t size, size_t alignment, uint64_t hint, uint64_t flags);
EXPORT unsigned cuMemAddressReserve(uint64_t *pointer_p, size_t size, size_t alignment, uint64_t hint, uint64_t flags)
{
	ENTER(MemAddressReserve);
	(void)alignment;
	(void)flags;
	if (size == 0 || size % GRANULARITY != 0)
		return INVALID_VALUE;
	void *base = mmap((void *)(uintptr_t)hint, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (base == MAP_FAILED)
		return OUT_OF_MEMORY;
	pthread_rwlock_wrlock(&ranges_lock);
	int i = 0;
	while (i < RESERVATIONS && reservations[i].size != 0)
		i++;
	if (i < RESERVATIONS) {
		reservations[i].base = (uintptr_t)base;
		reservations[i].size = size;
	}
	pthread_rwlock_unlock(&ranges_lock);
	*pointer_p = (uintptr_t)base;
	return i < RESERVATIONS ? OK : OUT_OF_MEMORY;
}

unsigned cuMemAddressFree(uint64_t pointer, size_t size);
EXPORT unsigned cuMemAddressFree(uint64_t pointer, size_t size)
{
	unsigned result = INVALID_VALUE;
	ENTER(MemAddressFree);
	pthread_rwlock_wrlock(&ranges_lock);
	const struct range *inside = range_after(pointer);
	bool used = inside != NULL && inside->base < pointer + size;
	for (int i = 0; i < RESERVATIONS && !used; i++) {
		if (reservations[i].size != size || reservations[i].base != pointer)
			continue;
		reservations[i].size = 0;
		(void)munmap((void *)(uintptr_t)pointer, size);
		result = OK;
		break;
	}
	pthread_rwlock_unlock(&ranges_lock);
	return result;
}

static bool is_reserved(uint64_t pointer, size_t size)
{
	for (int i = 0; i < RESERVATIONS; i++) {
		if (reservations[i].size != 0 && pointer >= reservations[i].base &&
		    pointer - reservations[i].base <= reservations[i].size &&
		    size <= reservations[i].size - (pointer - reservations[i].base))
			return true;
	}
	return false;
}

unsigned cuMemMap(uint64_t pointer, size_t size, size_t offset, uint64_t handle, uint64_t flags);
EXPORT unsigned cuMemMap(uint64_t pointer, size_t size, size_t offset, uint64_t handle, uint64_t flags)
{
	ENTER(MemMap);
	if (offset != 0 || flags != 0 || size == 0 || size % GRANULARITY != 0 || size > of(handle)->size)
		return INVALID_VALUE;
	pthread_rwlock_wrlock(&ranges_lock);
	const struct range *inside = range_after(pointer);
	struct range range = {.base = pointer,
	                      .size = size,
	                      .kind = RANGE_VMM,
	                      .device = of(handle)->device,
	                      .fd = of(handle)->fd,
	                      .buffer_id = next_id(),
	                      .block_id = of(handle)->block_id,
	                      .handle = of(handle)};
	bool good = is_reserved(pointer, size) && range_find(pointer) == NULL &&
	            (inside == NULL || inside->base >= pointer + size) && memory_show(&range, PROT_READ | PROT_WRITE) &&
	            range_add(&range) != NULL;
	if (good)
		of(handle)->refs++;
	pthread_rwlock_unlock(&ranges_lock);
	return good ? OK : INVALID_VALUE;
}

unsigned cuMemUnmap(uint64_t pointer, size_t size);
EXPORT unsigned cuMemUnmap(uint64_t pointer, size_t size)
{
	ENTER(MemUnmap);
	pthread_rwlock_wrlock(&ranges_lock);
	uint64_t at = pointer, end = pointer + size;
	while (at < end) {
		struct range *range = range_find(at);
		if (range == NULL || range->kind != RANGE_VMM || range->base != at || range->size > end - at)
			break;
		at += range->size;
		memory_hide(range);
		unref(range->handle);
		range_remove(range);
	}
	pthread_rwlock_unlock(&ranges_lock);
	return at == end ? OK : INVALID_VALUE;
}

unsigned cuMemSetAccess(uint64_t pointer, size_t size, const struct kvs_cu_access *access, size_t count);
EXPORT unsigned cuMemSetAccess(uint64_t pointer, size_t size, const struct kvs_cu_access *access, size_t count)
{
	const char *no = getenv("KVS_DOUBLE_CUDA_NO_READONLY");
	ENTER(MemSetAccess);
	if (count != 1 || access->location.type != KVS_CU_LOCATION_DEVICE)
		return INVALID_VALUE;
	if (access->flags == KVS_CU_ACCESS_READ && no != NULL && atoi(no) != 0)
		return NOT_SUPPORTED;
	pthread_rwlock_wrlock(&ranges_lock);
	uint64_t at = pointer, end = pointer + size;
	while (at < end) {
		struct range *range = range_find(at);
		if (range == NULL || range->kind != RANGE_VMM)
			break;
		range->access = access->flags;
		range->access_device = access->location.id;
		at = range->base + range->size;
	}
	pthread_rwlock_unlock(&ranges_lock);
	return at >= end ? OK : INVALID_VALUE;
}
