/* SPDX-License-Identifier: Apache-2.0 */
/* Allocations, what is known of a pointer, and legacy IPC. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "double.h"

/* Inside a struct kvs_cu_ipc_handle. */
struct ipc {
	uint32_t magic;
	int32_t pid;
	int32_t fd;
	uint32_t unused;
	uint64_t size;
	uint64_t inode;
	struct kvs_cu_uuid uuid;
	uint64_t serial;
};

_Static_assert(sizeof(struct ipc) <= KVS_CU_IPC_HANDLE_SIZE, "an IPC handle holds it");

#define IPC_MAGIC 0x43504944u

static uint64_t inode_of(int fd)
{
	char path[64], link[128];
	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	ssize_t size = readlink(path, link, sizeof(link) - 1);
	if (size <= 0)
		return 0;
	link[size] = '\0';
	const char *at = strstr(link, NAME_PREFIX);
	return at == NULL ? 0 : strtoull(at + strlen(NAME_PREFIX), NULL, 10);
}

static unsigned allocate(uint64_t *pointer_p, size_t size, enum range_kind kind)
{
	struct CUctx_st *context = current();
	if (context == NULL)
		return INVALID_CONTEXT;
	if (size == 0)
		return INVALID_VALUE;
	struct range range = {.size = (size + 511) / 512 * 512,
	                      .kind = kind,
	                      .device = context->device,
	                      .context = kind == RANGE_LEGACY ? context : NULL,
	                      .buffer_id = next_id(),
	                      .block_id = next_id()};
	bool plain = host_access;
	range.fd = memory_make(range.size);
	pthread_rwlock_wrlock(&ranges_lock);
	if (kind == RANGE_HOST || kind == RANGE_MANAGED)
		host_access = true;
	bool shown = range.fd >= 0 && memory_show(&range, PROT_READ | PROT_WRITE);
	host_access = plain;
	struct range *made = shown ? range_add(&range) : NULL;
	pthread_rwlock_unlock(&ranges_lock);
	if (made == NULL)
		return OUT_OF_MEMORY;
	*pointer_p = made->base;
	return OK;
}

static unsigned release(uint64_t pointer, enum range_kind kind)
{
	pthread_rwlock_wrlock(&ranges_lock);
	struct range *range = range_find(pointer);
	bool good = range != NULL && range->kind == kind && range->base == pointer;
	if (good) {
		memory_hide(range);
		close(range->fd);
		range_remove(range);
	}
	pthread_rwlock_unlock(&ranges_lock);
	return good ? OK : INVALID_VALUE;
}

unsigned cuMemAlloc_v2(uint64_t *pointer_p, size_t size);
EXPORT unsigned cuMemAlloc_v2(uint64_t *pointer_p, size_t size)
{
	ENTER(MemAlloc);
	return allocate(pointer_p, size, RANGE_LEGACY);
}

unsigned cuMemFree_v2(uint64_t pointer);
EXPORT unsigned cuMemFree_v2(uint64_t pointer)
{
	ENTER(MemFree);
	unsigned result = release(pointer, RANGE_LEGACY);
	result = result == OK ? OK : release(pointer, RANGE_POOL);
	return result == OK ? OK : release(pointer, RANGE_MANAGED);
}

unsigned cuMemAllocAsync(uint64_t *pointer_p, size_t size, void *stream);
EXPORT unsigned cuMemAllocAsync(uint64_t *pointer_p, size_t size, void *stream)
{
	ENTER(MemAllocAsync);
	(void)stream;
	return allocate(pointer_p, size, RANGE_POOL);
}

unsigned cuMemFreeAsync(uint64_t pointer, void *stream);
EXPORT unsigned cuMemFreeAsync(uint64_t pointer, void *stream)
{
	ENTER(MemFreeAsync);
	(void)stream;
	return release(pointer, RANGE_POOL);
}

unsigned cuMemAllocManaged(uint64_t *pointer_p, size_t size, unsigned flags);
EXPORT unsigned cuMemAllocManaged(uint64_t *pointer_p, size_t size, unsigned flags)
{
	ENTER(MemAllocManaged);
	(void)flags;
	return allocate(pointer_p, size, RANGE_MANAGED);
}

unsigned cuMemHostAlloc(void **memory_p, size_t size, unsigned flags);
EXPORT unsigned cuMemHostAlloc(void **memory_p, size_t size, unsigned flags)
{
	uint64_t pointer = 0;
	ENTER(MemHostAlloc);
	(void)flags;
	unsigned result = allocate(&pointer, size, RANGE_HOST);
	*memory_p = (void *)(uintptr_t)pointer;
	return result;
}

unsigned cuMemFreeHost(void *memory);
EXPORT unsigned cuMemFreeHost(void *memory)
{
	ENTER(MemFreeHost);
	return release((uintptr_t)memory, RANGE_HOST);
}

unsigned cuMemHostGetDevicePointer_v2(uint64_t *pointer_p, void *memory, unsigned flags);
EXPORT unsigned cuMemHostGetDevicePointer_v2(uint64_t *pointer_p, void *memory, unsigned flags)
{
	ENTER(MemHostGetDevicePointer);
	(void)flags;
	*pointer_p = (uintptr_t)memory;
	return OK;
}

/* ---- pointers ---- */

static void put(void *value_p, uint64_t value, size_t size)
{
	memcpy(value_p, &value, size);
}

static unsigned attribute(void *value_p, unsigned which, const struct range *range, bool *known_p)
{
	bool vmm = range != NULL && range->kind == RANGE_VMM;
	*known_p = true;
	switch (which) {
	case KVS_CU_POINTER_CONTEXT:
		put(value_p, range == NULL ? 0 : (uintptr_t)range->context, sizeof(void *));
		break;
	case KVS_CU_POINTER_MEMORY_TYPE:
		put(value_p,
		    range == NULL               ? 0
		    : range->kind == RANGE_HOST ? KVS_CU_MEMORYTYPE_HOST
		                                : KVS_CU_MEMORYTYPE_DEVICE,
		    sizeof(unsigned));
		break;
	case KVS_CU_POINTER_BUFFER_ID:
		put(value_p, range == NULL ? 0 : range->buffer_id, sizeof(uint64_t));
		break;
	case KVS_CU_POINTER_IS_MANAGED:
		put(value_p, range != NULL && range->kind == RANGE_MANAGED, 1);
		break;
	case KVS_CU_POINTER_DEVICE_ORDINAL:
		put(value_p, range == NULL ? 0 : (uint64_t)range->device, sizeof(int));
		break;
	case KVS_CU_POINTER_LEGACY_IPC:
		put(value_p, range != NULL && range->kind == RANGE_LEGACY, 1);
		break;
	case KVS_CU_POINTER_RANGE_START:
	case KVS_CU_POINTER_MAPPING_BASE:
		put(value_p, range == NULL ? 0 : range->base, sizeof(uint64_t));
		break;
	case KVS_CU_POINTER_RANGE_SIZE:
	case KVS_CU_POINTER_MAPPING_SIZE:
		put(value_p, range == NULL ? 0 : range->size, sizeof(size_t));
		break;
	case KVS_CU_POINTER_MAPPED:
		put(value_p, range != NULL, 1);
		break;
	case KVS_CU_POINTER_HANDLE_TYPES:
		put(value_p, vmm ? range->handle->types : 0, sizeof(uint64_t));
		break;
	case KVS_CU_POINTER_MEMPOOL:
		put(value_p, range != NULL && range->kind == RANGE_POOL ? 1 : 0, sizeof(void *));
		break;
	case KVS_CU_POINTER_BLOCK_ID:
		put(value_p, range == NULL ? 0 : range->block_id, sizeof(uint64_t));
		break;
	default:
		*known_p = false;
		return INVALID_VALUE;
	}
	return OK;
}

unsigned cuPointerGetAttribute(void *value_p, unsigned which, uint64_t pointer);
EXPORT unsigned cuPointerGetAttribute(void *value_p, unsigned which, uint64_t pointer)
{
	bool known;
	ENTER(PointerGetAttribute);
	pthread_rwlock_rdlock(&ranges_lock);
	const struct range *range = range_find(pointer);
	unsigned result = range == NULL ? INVALID_VALUE : attribute(value_p, which, range, &known);
	pthread_rwlock_unlock(&ranges_lock);
	return result;
}

unsigned cuPointerGetAttributes(unsigned count, unsigned *which, void **values_p, uint64_t pointer);
EXPORT unsigned cuPointerGetAttributes(unsigned count, unsigned *which, void **values_p, uint64_t pointer)
{
	unsigned result = OK;
	bool known;
	ENTER(PointerGetAttributes);
	pthread_rwlock_rdlock(&ranges_lock);
	const struct range *range = range_find(pointer);
	for (unsigned i = 0; i < count && result == OK; i++)
		result = attribute(values_p[i], which[i], range, &known);
	pthread_rwlock_unlock(&ranges_lock);
	return result;
}

unsigned cuMemGetAddressRange_v2(uint64_t *base_p, size_t *size_p, uint64_t pointer);
EXPORT unsigned cuMemGetAddressRange_v2(uint64_t *base_p, size_t *size_p, uint64_t pointer)
{
	ENTER(MemGetAddressRange);
	pthread_rwlock_rdlock(&ranges_lock);
	const struct range *range = range_find(pointer);
	if (range != NULL) {
		*base_p = range->base;
		*size_p = range->size;
	}
	pthread_rwlock_unlock(&ranges_lock);
	return range == NULL ? NOT_FOUND : OK;
}

/* ---- IPC ---- */

unsigned cuIpcGetMemHandle(struct kvs_cu_ipc_handle *handle_p, uint64_t pointer);
EXPORT unsigned cuIpcGetMemHandle(struct kvs_cu_ipc_handle *handle_p, uint64_t pointer)
{
	struct ipc ipc = {.magic = IPC_MAGIC, .pid = getpid()};
	ENTER(IpcGetMemHandle);
	pthread_rwlock_rdlock(&ranges_lock);
	const struct range *range = range_find(pointer);
	bool good = range != NULL && range->kind == RANGE_LEGACY;
	if (good) {
		ipc.fd = range->fd;
		ipc.size = range->size;
		ipc.inode = inode_of(range->fd);
		ipc.serial = range->buffer_id;
		(void)device_uuid(range->device, &ipc.uuid);
	}
	pthread_rwlock_unlock(&ranges_lock);
	memset(handle_p, 0, sizeof(*handle_p));
	memcpy(handle_p->bytes, &ipc, sizeof(ipc));
	return good ? OK : INVALID_VALUE;
}

/* Like the driver: one mapping per handle and process, counted. */
static struct range *opened(const struct kvs_cu_ipc_handle *handle)
{
	struct range *range = range_after(0);
	while (range != NULL && (range->kind != RANGE_IPC || memcmp(&range->ipc, handle, sizeof(*handle)) != 0))
		range = range_after(range->base + 1);
	return range;
}

unsigned cuIpcOpenMemHandle_v2(uint64_t *pointer_p, struct kvs_cu_ipc_handle handle, unsigned flags);
EXPORT unsigned cuIpcOpenMemHandle_v2(uint64_t *pointer_p, struct kvs_cu_ipc_handle handle, unsigned flags)
{
	struct ipc ipc;
	char path[64];
	struct CUctx_st *context = current();
	ENTER(IpcOpenMemHandle);
	memcpy(&ipc, handle.bytes, sizeof(ipc));
	if (context == NULL || ipc.pid == getpid())
		return INVALID_CONTEXT;
	if (ipc.magic != IPC_MAGIC || flags != KVS_CU_IPC_LAZY_PEER_ACCESS)
		return INVALID_VALUE;
	int device = device_of_uuid(&ipc.uuid);
	if (device < 0)
		return INVALID_DEVICE;
	if (!peers(device, context->device))
		return PEER_UNSUPPORTED;
	pthread_rwlock_wrlock(&ranges_lock);
	struct range *range = opened(&handle);
	if (range == NULL) {
		(void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", ipc.pid, ipc.fd);
		struct range made = {.size = ipc.size,
		                     .kind = RANGE_IPC,
		                     .device = device,
		                     .context = context,
		                     .buffer_id = next_id(),
		                     .block_id = next_id(),
		                     .ipc = handle};
		made.fd = open(path, O_RDWR | O_CLOEXEC);
		/* Freed meanwhile, or the descriptor is another allocation's now. */
		bool same = made.fd >= 0 && inode_of(made.fd) == ipc.inode;
		if (same && memory_show(&made, PROT_READ | PROT_WRITE))
			range = range_add(&made);
		else if (made.fd >= 0)
			close(made.fd);
	}
	if (range != NULL) {
		range->opens++;
		*pointer_p = range->base;
	}
	pthread_rwlock_unlock(&ranges_lock);
	return range == NULL ? INVALID_VALUE : OK;
}

unsigned cuIpcCloseMemHandle(uint64_t pointer);
EXPORT unsigned cuIpcCloseMemHandle(uint64_t pointer)
{
	ENTER(IpcCloseMemHandle);
	pthread_rwlock_wrlock(&ranges_lock);
	struct range *range = range_find(pointer);
	bool good = range != NULL && range->kind == RANGE_IPC && range->base == pointer;
	if (good && --range->opens == 0) {
		memory_hide(range);
		close(range->fd);
		range_remove(range);
	}
	pthread_rwlock_unlock(&ranges_lock);
	return good ? OK : INVALID_VALUE;
}
