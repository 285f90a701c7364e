/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_imports.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* An opened IPC handle: a process may open one only once in a context, whatever number of links use it. */
struct opened {
	struct opened *next;
	struct kvs_cu_ipc_handle handle;
	kvs_cu_context context;
	uint64_t base;
	uint32_t refs;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct opened *all_opened;

/* The context current. */
static bool open_legacy(struct kvs_cuda_gpu *gpu, const struct kvs_cu_ipc_handle *handle, uint64_t *base_p,
                        struct kvs_text *text)
{
	kvs_cu_pointer base = 0;
	pthread_mutex_lock(&lock);
	struct opened *found = all_opened;
	while (found != NULL &&
	       (found->context != gpu->context || memcmp(&found->handle, handle, sizeof(*handle)) != 0))
		found = found->next;
	struct opened *made = found == NULL ? calloc(1, sizeof(*made)) : NULL;
	if (found == NULL && made == NULL) {
		kvs_text_set(text, "out of memory");
	} else if (found == NULL &&
	           kvs_cuda_call(gpu->cuda, text, IpcOpenMemHandle, &base, *handle, KVS_CU_IPC_LAZY_PEER_ACCESS)) {
		found = made;
		found->handle = *handle;
		found->context = gpu->context;
		found->base = base;
		found->next = all_opened;
		all_opened = found;
	} else if (found == NULL) {
		free(made);
	}
	if (found != NULL) {
		found->refs++;
		*base_p = found->base;
	}
	pthread_mutex_unlock(&lock);
	return found != NULL;
}

/* The context current. */
static void close_legacy(struct kvs_cuda_gpu *gpu, uint64_t base)
{
	pthread_mutex_lock(&lock);
	struct opened **at = &all_opened;
	while (*at != NULL && ((*at)->base != base || (*at)->context != gpu->context))
		at = &(*at)->next;
	struct opened *found = *at;
	if (found != NULL && --found->refs == 0) {
		(void)gpu->cuda->IpcCloseMemHandle(base);
		*at = found->next;
		free(found);
	}
	pthread_mutex_unlock(&lock);
}

void kvs_cuda_imports_after_fork_in_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	all_opened = NULL;
}

/* Can this GPU read that one's memory? False with text that names both. */
static bool reachable(const struct kvs_cuda_gpu *gpu, const struct kvs_cu_uuid *uuid, struct kvs_text *text)
{
	char theirs[KVS_CUDA_UUID_TEXT], ours[KVS_CUDA_UUID_TEXT];
	kvs_cu_device device = kvs_cuda_device_by_uuid(gpu->cuda, uuid);
	int can = 0;
	kvs_cuda_uuid_text(uuid, theirs);
	kvs_cuda_uuid_text(&gpu->uuid, ours);
	if (device < 0) {
		kvs_text_set(text,
		             "the prefill's %s is not visible to this process, which uses %s: CUDA_VISIBLE_DEVICES (or "
		             "the container's devices) must hold both",
		             theirs, ours);
		return false;
	}
	if (device == gpu->device)
		return true;
	if (!kvs_cuda_call(gpu->cuda, text, DeviceCanAccessPeer, &can, gpu->device, device))
		return false;
	if (!can)
		kvs_text_set(text, "no peer access from the decode's %s to the prefill's %s", ours, theirs);
	return can != 0;
}

static bool open_all(struct kvs_cuda_imports *imports, struct kvs_text *text)
{
	for (uint32_t i = 0; i < imports->exports->count; i++) {
		const struct kvs_cuda_export *allocation = &imports->exports->allocations[i];
		if (allocation->kind != KVS_CUDA_LEGACY)
			continue;
		if (!open_legacy(imports->gpu, &allocation->handle, &imports->allocations[i].base, text))
			return false;
		imports->extents[allocation->extent] = imports->allocations[i].base;
	}
	return true;
}

struct kvs_cuda_imports *kvs_cuda_imports_new(struct kvs_cuda_exports *exports, const struct kvs_layout *layout,
                                              struct kvs_cuda_gpu *gpu, struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	struct kvs_cuda_imports *imports = calloc(1, sizeof(*imports));
	if (imports == NULL) {
		kvs_cuda_exports_free(exports);
		kvs_text_set(text, "out of memory");
		return NULL;
	}
	imports->exports = exports;
	imports->layout = layout;
	imports->gpu = gpu;
	kvs_cuda_gpu_ref(gpu);
	imports->allocations = calloc((size_t)exports->count + 1, sizeof(*imports->allocations));
	imports->extents = calloc((size_t)exports->extent_count + 1, sizeof(*imports->extents));
	bool ok = imports->allocations != NULL && imports->extents != NULL;
	if (!ok)
		kvs_text_set(text, "out of memory");
	if (ok && exports->reason.s[0] != '\0') {
		*text = exports->reason;
		ok = false;
	}
	if (ok && !kvs_cuda_enter(&scope, gpu->cuda, gpu->context, text)) {
		ok = false;
	} else if (ok) {
		ok = reachable(gpu, &exports->uuid, text) && open_all(imports, text);
		kvs_cuda_leave(&scope);
	}
	if (ok)
		return imports;
	kvs_cuda_imports_free(imports);
	return NULL;
}

/* The context current. */
static void unmap(struct kvs_cuda_imports *imports, uint32_t index)
{
	struct kvs_cuda_import *import = &imports->allocations[index];
	const struct kvs_cuda_export *allocation = &imports->exports->allocations[index];
	if (import->base == 0)
		return;
	if (allocation->kind == KVS_CUDA_LEGACY) {
		close_legacy(imports->gpu, import->base);
	} else {
		(void)imports->gpu->cuda->MemUnmap(import->base, allocation->size);
		imports->mapped--;
	}
	import->base = 0;
}

void kvs_cuda_imports_free(struct kvs_cuda_imports *imports)
{
	struct kvs_cuda_scope scope;
	struct kvs_text ignored;
	if (imports == NULL)
		return;
	const struct kvs_cuda_exports *exports = imports->exports;
	if (imports->allocations != NULL && imports->extents != NULL &&
	    kvs_cuda_enter(&scope, imports->gpu->cuda, imports->gpu->context, &ignored)) {
		for (uint32_t i = 0; i < exports->count; i++) {
			const struct kvs_cuda_export *allocation = &exports->allocations[i];
			bool last = i + 1 == exports->count || exports->allocations[i + 1].extent != allocation->extent;
			uint64_t extent = imports->extents[allocation->extent];
			unmap(imports, i);
			if (kvs_cuda_kind_mapped(allocation->kind) && last && extent != 0)
				(void)imports->gpu->cuda->MemAddressFree(extent,
				                                         exports->extent_sizes[allocation->extent]);
		}
		kvs_cuda_leave(&scope);
	}
	kvs_cuda_gpu_put(imports->gpu);
	kvs_cuda_exports_free(imports->exports);
	free(imports->allocations);
	free(imports->extents);
	free(imports);
}

static uint32_t first_tensor(const struct kvs_cuda_imports *imports, uint32_t component)
{
	uint32_t index = 0;
	for (uint32_t c = 0; c < component; c++)
		index += imports->layout->components[c].tensor_count;
	return index;
}

/* The allocation that holds this byte of an extent. */
static uint32_t find(const struct kvs_cuda_exports *exports, uint32_t extent, uint64_t offset)
{
	uint32_t low = 0, high = exports->count;
	while (high - low > 1) {
		uint32_t middle = low + (high - low) / 2;
		const struct kvs_cuda_export *allocation = &exports->allocations[middle];
		if (allocation->extent < extent || (allocation->extent == extent && allocation->offset <= offset))
			low = middle;
		else
			high = middle;
	}
	return low;
}

uint32_t kvs_cuda_imports_missing(struct kvs_cuda_imports *imports, const struct kvs_plan *plan, uint32_t component,
                                  uint64_t now_ns, uint32_t *list_p, uint32_t limit)
{
	const struct kvs_cuda_exports *exports = imports->exports;
	uint32_t count = 0, first = first_tensor(imports, component);
	for (uint32_t i = 0; i < plan->copy_count; i++) {
		uint32_t t = plan->copies[i].src_tensor;
		const struct kvs_cuda_export_place *place = &exports->tensors[first + t];
		uint64_t item_len = imports->layout->components[component].tensors[t].item_len;
		for (uint32_t p = 0; p < plan->pair_count; p++) {
			uint64_t at = place->offset + plan->pairs[p].src * item_len, end = at + item_len;
			while (at < end) {
				uint32_t index = find(exports, place->extent, at);
				struct kvs_cuda_import *import = &imports->allocations[index];
				/* Looked at already: mapped, or in the list (the mark of this very call). */
				bool listed = import->used_ns == now_ns;
				import->used_ns = now_ns;
				if (import->base == 0 && !listed && count < limit)
					list_p[count++] = index;
				else if (import->base == 0 && !listed)
					import->used_ns = 0; /* for the next list */
				at = exports->allocations[index].offset + exports->allocations[index].size;
			}
		}
	}
	return count;
}

bool kvs_cuda_imports_by_fd(const struct kvs_cuda_imports *imports, uint32_t index)
{
	return index < imports->exports->count && imports->exports->allocations[index].kind == KVS_CUDA_VMM;
}

bool kvs_cuda_imports_map(struct kvs_cuda_imports *imports, uint32_t index, const struct kvs_cuda_shareable *shareable,
                          struct kvs_text *text)
{
	const struct kvs_cuda *cuda = imports->gpu->cuda;
	const struct kvs_cuda_exports *exports = imports->exports;
	struct kvs_cuda_scope scope;
	kvs_cu_handle handle = 0;
	if (index >= exports->count || !kvs_cuda_kind_mapped(exports->allocations[index].kind)) {
		kvs_text_set(text, "a descriptor or handle for allocation %u, which takes none", index);
		return false;
	}
	const struct kvs_cuda_export *allocation = &exports->allocations[index];
	if (imports->allocations[index].base != 0)
		return true;
	if (!kvs_cuda_enter(&scope, cuda, imports->gpu->context, text))
		return false;
	uint64_t *extent = &imports->extents[allocation->extent];
	kvs_cu_pointer reserved = 0;
	bool ok = *extent != 0 || kvs_cuda_call(cuda, text, MemAddressReserve, &reserved,
	                                        exports->extent_sizes[allocation->extent], 0, 0, 0);
	if (reserved != 0)
		*extent = reserved;
	uint64_t base = *extent + allocation->offset;
	bool by_fd = allocation->kind == KVS_CUDA_VMM;
	struct kvs_cu_fabric_handle fabric = shareable->fabric;
	ok = ok && kvs_cuda_call(cuda, text, MemImportFromShareableHandle, &handle,
	                         by_fd ? (void *)(intptr_t)shareable->fd : (void *)&fabric,
	                         by_fd ? KVS_CU_HANDLE_POSIX_FD : KVS_CU_HANDLE_FABRIC);
	if (ok) {
		ok = kvs_cuda_call(cuda, text, MemMap, base, allocation->size, 0, handle, 0);
		(void)cuda->MemRelease(handle); /* the mapping keeps it */
	}
	if (ok) {
		struct kvs_cu_access access = {.location = {KVS_CU_LOCATION_DEVICE, imports->gpu->device},
		                               .flags = KVS_CU_ACCESS_READ};
		/* Read-only where the driver can; it is never written through in any case. */
		if (cuda->MemSetAccess(base, allocation->size, &access, 1) != KVS_CU_SUCCESS) {
			access.flags = KVS_CU_ACCESS_READWRITE;
			ok = kvs_cuda_call(cuda, text, MemSetAccess, base, allocation->size, &access, 1);
		}
		if (!ok)
			(void)cuda->MemUnmap(base, allocation->size);
	}
	kvs_cuda_leave(&scope);
	if (!ok)
		return false;
	imports->allocations[index].base = base;
	imports->mapped++;
	return true;
}

void kvs_cuda_imports_sources(const struct kvs_cuda_imports *imports, uint32_t component, uint64_t *sources_p)
{
	uint32_t first = first_tensor(imports, component);
	for (uint32_t t = 0; t < imports->layout->components[component].tensor_count; t++) {
		const struct kvs_cuda_export_place *place = &imports->exports->tensors[first + t];
		bool held = place->extent != KVS_CUDA_NO_EXTENT && imports->extents[place->extent] != 0;
		sources_p[t] = held ? imports->extents[place->extent] + place->offset : 0;
	}
}

int kvs_cuda_imports_expire(struct kvs_cuda_imports *imports, uint64_t now_ns)
{
	struct kvs_cuda_scope scope;
	struct kvs_text ignored;
	uint64_t soonest = UINT64_MAX;
	if (imports->mapped == 0 || !kvs_cuda_enter(&scope, imports->gpu->cuda, imports->gpu->context, &ignored))
		return -1;
	for (uint32_t i = 0; i < imports->exports->count; i++) {
		struct kvs_cuda_import *import = &imports->allocations[i];
		if (import->base == 0 || !kvs_cuda_kind_mapped(imports->exports->allocations[i].kind))
			continue;
		uint64_t due = import->used_ns + KVS_CUDA_IDLE_NS;
		if (due <= now_ns)
			unmap(imports, i);
		else if (due - now_ns < soonest)
			soonest = due - now_ns;
	}
	kvs_cuda_leave(&scope);
	return soonest == UINT64_MAX ? -1 : (int)(soonest / 1000000U) + 1;
}
