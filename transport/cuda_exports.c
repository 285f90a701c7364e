/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_exports.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define OFFER_VERSION 1

/* The IPC handles of all legacy allocations; false with text. The memory's lock held, its context current. */
static bool legacy_handles(const struct kvs_cuda_memory *memory, struct kvs_cu_ipc_handle *handles_p,
                           struct kvs_text *text)
{
	const struct kvs_cuda *cuda = memory->gpu->cuda;
	for (uint32_t i = 0; i < memory->count; i++) {
		const struct kvs_cuda_allocation *allocation = &memory->allocations[i];
		struct kvs_text why;
		if (allocation->kind != KVS_CUDA_LEGACY ||
		    kvs_cuda_call(cuda, &why, IpcGetMemHandle, &handles_p[i], allocation->base))
			continue;
		kvs_text_set(text, "GPU memory at 0x%" PRIx64 " cannot be shared: %.200s", allocation->base, why.s);
		return false;
	}
	return true;
}

static void put_tensors(struct kvs_writer *writer, const struct kvs_cuda_memory *memory)
{
	const struct kvs_layout *layout = memory->layout;
	for (uint32_t c = 0; c < layout->component_count; c++) {
		for (uint32_t t = 0; t < layout->components[c].tensor_count; t++) {
			const struct kvs_tensor *tensor = &layout->components[c].tensors[t];
			int64_t found = tensor->item_len == 0 || tensor->length == 0
			                        ? -1
			                        : kvs_cuda_memory_find(memory, tensor->address);
			int64_t first = found;
			while (first > 0 && memory->allocations[first - 1].extent == memory->allocations[found].extent)
				first--;
			kvs_put_u32(writer, found < 0 ? KVS_CUDA_NO_EXTENT : memory->allocations[found].extent);
			kvs_put_u64(writer, found < 0 ? 0 : tensor->address - memory->allocations[first].base);
		}
	}
}

static uint32_t tensors_of(const struct kvs_layout *layout)
{
	uint32_t count = 0;
	for (uint32_t c = 0; c < layout->component_count; c++)
		count += layout->components[c].tensor_count;
	return count;
}

void kvs_cuda_exports_put(struct kvs_writer *writer, struct kvs_cuda_memory *memory)
{
	struct kvs_text reason = {.s = ""};
	struct kvs_cuda_scope scope;
	bool is_private = kvs_cuda_memory_private(memory, &reason);
	pthread_mutex_lock(&memory->lock);
	struct kvs_cu_ipc_handle *handles = calloc((size_t)memory->count + 1, sizeof(*handles));
	if (handles == NULL) {
		kvs_text_set(&reason, "out of memory");
	} else if (!is_private && kvs_cuda_enter(&scope, memory->gpu->cuda, memory->gpu->context, &reason)) {
		(void)legacy_handles(memory, handles, &reason);
		kvs_cuda_leave(&scope);
	}
	kvs_put_u32(writer, OFFER_VERSION);
	kvs_put_bytes(writer, memory->gpu->uuid.bytes, KVS_CU_UUID_SIZE);
	kvs_put_string(writer, reason.s);
	bool shared = reason.s[0] == '\0' && handles != NULL;
	kvs_put_u32(writer, shared ? memory->count : 0);
	for (uint32_t i = 0; shared && i < memory->count; i++) {
		kvs_put_u32(writer, memory->allocations[i].kind);
		kvs_put_u32(writer, memory->allocations[i].extent);
		kvs_put_u64(writer, memory->allocations[i].size);
		kvs_put_bytes(writer, handles[i].bytes, KVS_CU_IPC_HANDLE_SIZE);
	}
	kvs_put_u32(writer, shared ? tensors_of(memory->layout) : 0);
	if (shared)
		put_tensors(writer, memory);
	pthread_mutex_unlock(&memory->lock);
	free(handles);
}

void kvs_cuda_exports_free(struct kvs_cuda_exports *exports)
{
	if (exports == NULL)
		return;
	free(exports->allocations);
	free(exports->extent_sizes);
	free(exports->tensors);
	free(exports);
}

static bool get_allocations(struct kvs_reader *reader, struct kvs_cuda_exports *exports, struct kvs_text *text)
{
	exports->count = kvs_get_u32(reader);
	if (exports->count > KVS_CUDA_ALLOCATIONS_MAX ||
	    exports->count > reader->left / (2 * sizeof(uint32_t) + sizeof(uint64_t) + KVS_CU_IPC_HANDLE_SIZE)) {
		kvs_text_set(text, "%u allocations are offered in %zu bytes", exports->count, reader->left);
		return false;
	}
	exports->allocations = calloc((size_t)exports->count + 1, sizeof(*exports->allocations));
	exports->extent_sizes = calloc((size_t)exports->count + 1, sizeof(*exports->extent_sizes));
	if (exports->allocations == NULL || exports->extent_sizes == NULL) {
		kvs_text_set(text, "out of memory");
		return false;
	}
	for (uint32_t i = 0; i < exports->count; i++) {
		struct kvs_cuda_export *now = &exports->allocations[i];
		uint32_t kind = kvs_get_u32(reader);
		bool known = kind == KVS_CUDA_LEGACY || kind == KVS_CUDA_VMM || kind == KVS_CUDA_FABRIC;
		now->kind = known ? (enum kvs_cuda_kind)kind : KVS_CUDA_LEGACY;
		now->extent = kvs_get_u32(reader);
		now->size = kvs_get_u64(reader);
		kvs_get_bytes(reader, now->handle.bytes, KVS_CU_IPC_HANDLE_SIZE);
		bool follows = i > 0 && now->extent == now[-1].extent;
		bool joins = !follows || (kvs_cuda_kind_mapped(now->kind) && kvs_cuda_kind_mapped(now[-1].kind));
		if (!known || !joins || now->size == 0 || (!follows && now->extent != exports->extent_count)) {
			kvs_text_set(text,
			             "allocation %u of the offer (kind %u, extent %u, %" PRIu64
			             " bytes) makes no sense",
			             i, kind, now->extent, now->size);
			return false;
		}
		exports->extent_count = now->extent + 1;
		now->offset = exports->extent_sizes[now->extent];
		if (__builtin_add_overflow(now->offset, now->size, &exports->extent_sizes[now->extent])) {
			kvs_text_set(text, "extent %u of the offer is larger than 2^64 bytes", now->extent);
			return false;
		}
	}
	return true;
}

static bool place_fits(const struct kvs_cuda_exports *exports, const struct kvs_cuda_export_place *place,
                       const struct kvs_tensor *tensor)
{
	if (tensor->item_len == 0 || tensor->length == 0)
		return place->extent == KVS_CUDA_NO_EXTENT;
	if (place->extent >= exports->extent_count)
		return false;
	uint64_t size = exports->extent_sizes[place->extent];
	return place->offset <= size && tensor->length <= size - place->offset;
}

static bool get_tensors(struct kvs_reader *reader, struct kvs_cuda_exports *exports, const struct kvs_layout *layout,
                        struct kvs_text *text)
{
	uint32_t index = 0;
	exports->tensor_count = kvs_get_u32(reader);
	if (exports->tensor_count != tensors_of(layout)) {
		kvs_text_set(text, "the offer has %u tensors and the layout %u", exports->tensor_count,
		             tensors_of(layout));
		return false;
	}
	exports->tensors = calloc((size_t)exports->tensor_count + 1, sizeof(*exports->tensors));
	if (exports->tensors == NULL) {
		kvs_text_set(text, "out of memory");
		return false;
	}
	for (uint32_t c = 0; c < layout->component_count; c++) {
		for (uint32_t t = 0; t < layout->components[c].tensor_count; t++, index++) {
			struct kvs_cuda_export_place *place = &exports->tensors[index];
			place->extent = kvs_get_u32(reader);
			place->offset = kvs_get_u64(reader);
			if (place_fits(exports, place, &layout->components[c].tensors[t]))
				continue;
			kvs_text_set(text, "component %u tensor %u lies outside the memory that is offered", c, t);
			return false;
		}
	}
	return true;
}

struct kvs_cuda_exports *kvs_cuda_exports_get(const void *data, size_t size, const struct kvs_layout *layout,
                                              struct kvs_text *text)
{
	struct kvs_reader reader = {.data = data, .left = size};
	struct kvs_cuda_exports *exports = calloc(1, sizeof(*exports));
	if (exports == NULL) {
		kvs_text_set(text, "out of memory");
		return NULL;
	}
	uint32_t version = kvs_get_u32(&reader);
	kvs_get_bytes(&reader, exports->uuid.bytes, KVS_CU_UUID_SIZE);
	kvs_get_text(&reader, &exports->reason);
	bool ok = version == OFFER_VERSION;
	if (!ok)
		kvs_text_set(text, "the offer of GPU memory is of version %u, not %u", version, OFFER_VERSION);
	ok = ok && get_allocations(&reader, exports, text);
	if (ok && exports->count > 0)
		ok = get_tensors(&reader, exports, layout, text);
	else if (ok)
		ok = kvs_get_u32(&reader) == 0;
	if (ok && (reader.failed || reader.left != 0)) {
		kvs_text_set(text, "the offer of GPU memory is cut off, or followed by %zu bytes", reader.left);
		ok = false;
	}
	if (ok)
		return exports;
	kvs_cuda_exports_free(exports);
	return NULL;
}

bool kvs_cuda_export(struct kvs_cuda_memory *memory, uint32_t index, struct kvs_cuda_shareable *shareable_p,
                     struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	kvs_cu_handle handle = 0;
	bool ok = false;
	memset(shareable_p, 0, sizeof(*shareable_p));
	shareable_p->fd = -1;
	pthread_mutex_lock(&memory->lock);
	const struct kvs_cuda *cuda = memory->gpu->cuda;
	const struct kvs_cuda_allocation *allocation = index < memory->count ? &memory->allocations[index] : NULL;
	if (allocation == NULL || !kvs_cuda_kind_mapped(allocation->kind)) {
		kvs_text_set(text, "allocation %u is none that is passed when it is needed", index);
	} else if (kvs_cuda_enter(&scope, cuda, memory->gpu->context, text)) {
		void *address = (void *)(uintptr_t)allocation->base;
		bool by_fd = allocation->kind == KVS_CUDA_VMM;
		if (kvs_cuda_allocation_same(memory, allocation, text) &&
		    kvs_cuda_call(cuda, text, MemRetainAllocationHandle, &handle, address)) {
			ok = kvs_cuda_call(cuda, text, MemExportToShareableHandle,
			                   by_fd ? (void *)&shareable_p->fd : (void *)&shareable_p->fabric, handle,
			                   by_fd ? KVS_CU_HANDLE_POSIX_FD : KVS_CU_HANDLE_FABRIC, 0);
			(void)cuda->MemRelease(handle);
		}
		kvs_cuda_leave(&scope);
	}
	if (!ok)
		shareable_p->fd = -1;
	pthread_mutex_unlock(&memory->lock);
	return ok;
}
