/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "cuda_memory.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

/* What the driver says about an address, as far as it matters. Zero where it says nothing. */
struct facts {
	uint64_t type;
	uint64_t ordinal;
	uint64_t managed;
	uint64_t legacy;
	uint64_t range_base;
	uint64_t range_size;
	uint64_t handle_types;
	uint64_t pool;
	uint64_t mapping_base;
	uint64_t mapping_size;
	uint64_t buffer_id;
	uint64_t block_id;
};

static const struct {
	const char *name;
	const char *reason;
} kinds[] = {[KVS_CUDA_HOST] = {"host", NULL},
#define X(id, number, name, reason) [KVS_CUDA_##id] = {name, reason},
             KVS_CUDA_KINDS(X)
#undef X
};

const char *kvs_cuda_kind_name(enum kvs_cuda_kind kind)
{
	return kinds[kind].name;
}

static bool ask(const struct kvs_cuda *cuda, uint64_t address, struct facts *facts_p, struct kvs_text *text)
{
	unsigned attributes[] = {
	        KVS_CU_POINTER_MEMORY_TYPE,  KVS_CU_POINTER_DEVICE_ORDINAL, KVS_CU_POINTER_IS_MANAGED,
	        KVS_CU_POINTER_LEGACY_IPC,   KVS_CU_POINTER_RANGE_START,    KVS_CU_POINTER_RANGE_SIZE,
	        KVS_CU_POINTER_HANDLE_TYPES, KVS_CU_POINTER_MEMPOOL,        KVS_CU_POINTER_MAPPING_BASE,
	        KVS_CU_POINTER_MAPPING_SIZE, KVS_CU_POINTER_BUFFER_ID,      KVS_CU_POINTER_BLOCK_ID};
	void *values[] = {&facts_p->type,         &facts_p->ordinal,      &facts_p->managed,      &facts_p->legacy,
	                  &facts_p->range_base,   &facts_p->range_size,   &facts_p->handle_types, &facts_p->pool,
	                  &facts_p->mapping_base, &facts_p->mapping_size, &facts_p->buffer_id,    &facts_p->block_id};
	/* Values narrower than 64 bits leave the rest of a zeroed one alone. */
	memset(facts_p, 0, sizeof(*facts_p));
	return kvs_cuda_call(cuda, text, PointerGetAttributes, sizeof(attributes) / sizeof(attributes[0]), attributes,
	                     values, address);
}

/* The handle of mapped memory, as a number to compare; the reference that the driver gives is returned at once. */
static bool peek_handle(const struct kvs_cuda *cuda, uint64_t address, uint64_t *handle_p)
{
	kvs_cu_handle handle = 0;
	if (cuda->MemRetainAllocationHandle(&handle, (void *)(uintptr_t)address) != KVS_CU_SUCCESS)
		return false;
	(void)cuda->MemRelease(handle);
	*handle_p = handle;
	return true;
}

/* What holds this address. kind HOST: nothing of the device does. */
static bool classify(const struct kvs_cuda *cuda, uint64_t address, struct kvs_cuda_allocation *found,
                     struct facts *facts_p, struct kvs_text *text)
{
	memset(found, 0, sizeof(*found));
	if (!ask(cuda, address, facts_p, text))
		return false;
	if (facts_p->type != KVS_CU_MEMORYTYPE_DEVICE)
		return true;
	found->base = facts_p->range_base;
	found->size = facts_p->range_size;
	found->buffer_id = facts_p->buffer_id;
	found->block_id = facts_p->block_id;
	if (facts_p->managed != 0) {
		found->kind = KVS_CUDA_MANAGED;
	} else if (facts_p->pool != 0) {
		found->kind = KVS_CUDA_POOL;
	} else if (facts_p->legacy != 0) {
		found->kind = KVS_CUDA_LEGACY;
	} else {
		/* A range may hold several physical allocations: each is looked at by itself. */
		found->kind = KVS_CUDA_PRIVATE;
		if (facts_p->mapping_size != 0) {
			found->base = facts_p->mapping_base;
			found->size = facts_p->mapping_size;
		}
		bool whole = peek_handle(cuda, address, &found->handle);
		if (whole && (facts_p->handle_types & KVS_CU_HANDLE_POSIX_FD) != 0)
			found->kind = KVS_CUDA_VMM;
		else if (whole && (facts_p->handle_types & KVS_CU_HANDLE_FABRIC) != 0)
			found->kind = KVS_CUDA_FABRIC;
	}
	uint64_t end;
	if (__builtin_add_overflow(found->base, found->size, &end) || address < found->base || address >= end) {
		kvs_text_set(text,
		             "the CUDA driver says that the allocation of address 0x%" PRIx64 " is %" PRIu64
		             " bytes at 0x%" PRIx64,
		             address, found->size, found->base);
		return false;
	}
	return true;
}

int64_t kvs_cuda_memory_find(const struct kvs_cuda_memory *memory, uint64_t address)
{
	uint32_t low = 0, high = memory->count;
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		const struct kvs_cuda_allocation *allocation = &memory->allocations[middle];
		if (address < allocation->base)
			high = middle;
		else if (address - allocation->base >= allocation->size)
			low = middle + 1;
		else
			return middle;
	}
	return -1;
}

static bool insert(struct kvs_cuda_memory *memory, const struct kvs_cuda_allocation *allocation, struct kvs_text *text)
{
	if (memory->count == memory->capacity) {
		uint32_t capacity = memory->capacity == 0 ? 64 : memory->capacity * 2;
		void *grown = capacity > KVS_CUDA_ALLOCATIONS_MAX
		                      ? NULL
		                      : realloc(memory->allocations, capacity * sizeof(memory->allocations[0]));
		if (grown == NULL) {
			kvs_text_set(text, "no memory for a list of %u device allocations (at most %u)", capacity,
			             KVS_CUDA_ALLOCATIONS_MAX);
			return false;
		}
		memory->allocations = grown;
		memory->capacity = capacity;
	}
	uint32_t at = memory->count++;
	for (; at > 0 && memory->allocations[at - 1].base > allocation->base; at--)
		memory->allocations[at] = memory->allocations[at - 1];
	memory->allocations[at] = *allocation;
	return true;
}

struct place {
	uint32_t component;
	uint32_t tensor;
};

static bool add_tensor(struct kvs_cuda_memory *memory, const struct kvs_tensor *tensor, struct place place,
                       struct kvs_text *text)
{
	const struct kvs_cuda *cuda = memory->gpu->cuda;
	uint64_t at = tensor->address, end = tensor->address + tensor->length; /* checked with the layout */
	while (at < end) {
		int64_t known = kvs_cuda_memory_find(memory, at);
		if (known >= 0) {
			at = memory->allocations[known].base + memory->allocations[known].size;
			continue;
		}
		struct kvs_cuda_allocation found;
		struct facts facts;
		if (!classify(cuda, at, &found, &facts, text))
			return false;
		if (found.kind == KVS_CUDA_HOST) {
			kvs_text_set(text,
			             "component %u tensor %u: %" PRIu64 " of its %" PRIu64
			             " bytes are not (or no longer) allocated on the GPU",
			             place.component, place.tensor, end - at, tensor->length);
			return false;
		}
		if ((kvs_cu_device)facts.ordinal != memory->gpu->device) {
			kvs_text_set(text,
			             "component %u tensor %u is on GPU %d and other tensors of this rank on GPU %d",
			             place.component, place.tensor, (int)facts.ordinal, memory->gpu->device);
			return false;
		}
		if (!insert(memory, &found, text))
			return false;
		at = found.base + found.size;
	}
	return true;
}

static void number_extents(struct kvs_cuda_memory *memory)
{
	for (uint32_t i = 0; i < memory->count; i++) {
		struct kvs_cuda_allocation *now = &memory->allocations[i];
		const struct kvs_cuda_allocation *before = i > 0 ? now - 1 : NULL;
		bool joined = before != NULL && kvs_cuda_kind_mapped(now->kind) && kvs_cuda_kind_mapped(before->kind) &&
		              before->base + before->size == now->base;
		now->extent = before == NULL ? 0 : before->extent + (joined ? 0 : 1);
	}
}

/* Fill a list that is empty, with the context current. */
static bool look(struct kvs_cuda_memory *memory, struct kvs_text *text)
{
	const struct kvs_layout *layout = memory->layout;
	for (uint32_t c = 0; c < layout->component_count; c++) {
		for (uint32_t t = 0; t < layout->components[c].tensor_count; t++) {
			const struct kvs_tensor *tensor = &layout->components[c].tensors[t];
			struct place place = {c, t};
			if (tensor->item_len != 0 && tensor->length != 0 && !add_tensor(memory, tensor, place, text))
				return false;
		}
	}
	number_extents(memory);
	return true;
}

/* The first address of the layout that is device memory, 0: none. */
static uint64_t device_address(const struct kvs_layout *layout)
{
	for (uint32_t c = 0; c < layout->component_count; c++) {
		for (uint32_t t = 0; t < layout->components[c].tensor_count; t++) {
			const struct kvs_tensor *tensor = &layout->components[c].tensors[t];
			if (tensor->item_len != 0 && tensor->length != 0 && kvs_memory_is_device(tensor->address))
				return tensor->address;
		}
	}
	return 0;
}

bool kvs_cuda_memory_new(const struct kvs_layout *layout, struct kvs_cuda_memory **memory_p, struct kvs_text *text)
{
	struct kvs_text why;
	uint64_t address = device_address(layout);
	*memory_p = NULL;
	if (address == 0)
		return true;
	const struct kvs_cuda *cuda = kvs_cuda_get(&why);
	if (cuda == NULL) {
		kvs_text_set(text, "the registered memory is on a GPU, which cannot be used: %s", why.s);
		return false;
	}
	struct kvs_cuda_memory *memory = calloc(1, sizeof(*memory));
	struct kvs_cuda_scope scope;
	if (memory == NULL) {
		kvs_text_set(text, "out of memory");
		return false;
	}
	pthread_mutex_init(&memory->lock, NULL);
	memory->layout = layout;
	memory->epoch = 1;
	memory->gpu = kvs_cuda_gpu_of(cuda, address, text);
	bool ok = memory->gpu != NULL && kvs_cuda_enter(&scope, cuda, memory->gpu->context, text);
	if (ok) {
		ok = look(memory, text);
		kvs_cuda_leave(&scope);
	}
	if (ok)
		*memory_p = memory;
	else
		kvs_cuda_memory_free(memory);
	return ok;
}

void kvs_cuda_memory_free(struct kvs_cuda_memory *memory)
{
	if (memory == NULL)
		return;
	kvs_cuda_gpu_put(memory->gpu);
	pthread_mutex_destroy(&memory->lock);
	free(memory->allocations);
	free(memory);
}

bool kvs_cuda_memory_private(struct kvs_cuda_memory *memory, struct kvs_text *reason_p)
{
	bool is_private = false;
	pthread_mutex_lock(&memory->lock);
	for (uint32_t i = 0; i < memory->count && !is_private; i++) {
		const char *reason = kinds[memory->allocations[i].kind].reason;
		is_private = reason != NULL;
		if (is_private)
			kvs_text_set(reason_p, "GPU memory at 0x%" PRIx64 " cannot be shared: %s",
			             memory->allocations[i].base, reason);
	}
	pthread_mutex_unlock(&memory->lock);
	return is_private;
}

bool kvs_cuda_allocation_same(const struct kvs_cuda_memory *memory, const struct kvs_cuda_allocation *allocation,
                              struct kvs_text *text)
{
	struct kvs_cuda_allocation now;
	struct facts facts;
	if (!classify(memory->gpu->cuda, allocation->base, &now, &facts, text))
		return false;
	if (now.kind == allocation->kind && now.base == allocation->base && now.size == allocation->size &&
	    now.buffer_id == allocation->buffer_id && now.block_id == allocation->block_id &&
	    now.handle == allocation->handle)
		return true;
	kvs_text_set(text, "the %" PRIu64 " bytes of GPU memory at 0x%" PRIx64 " (%s) were %s by their owner",
	             allocation->size, allocation->base, kvs_cuda_kind_name(allocation->kind),
	             now.kind == KVS_CUDA_HOST ? "freed or paused" : "replaced");
	return false;
}

/* A stretch of memory that is touched: its allocations are checked, each once per stamp. */
static bool check_range(struct kvs_cuda_memory *memory, uint64_t address, uint64_t size, struct kvs_text *text)
{
	uint64_t at = address, end = address + size;
	while (at < end) {
		int64_t index = kvs_cuda_memory_find(memory, at);
		if (index < 0) {
			kvs_text_set(text, "address 0x%" PRIx64 " is in no registered allocation", at);
			return false;
		}
		struct kvs_cuda_allocation *allocation = &memory->allocations[index];
		if (allocation->checked != memory->stamp && !kvs_cuda_allocation_same(memory, allocation, text))
			return false;
		allocation->checked = memory->stamp;
		at = allocation->base + allocation->size;
	}
	return true;
}

static bool begin_check(struct kvs_cuda_memory *memory, struct kvs_cuda_scope *scope, struct kvs_text *text)
{
	pthread_mutex_lock(&memory->lock);
	memory->stamp++;
	if (kvs_cuda_enter(scope, memory->gpu->cuda, memory->gpu->context, text))
		return true;
	pthread_mutex_unlock(&memory->lock);
	return false;
}

static void end_check(struct kvs_cuda_memory *memory, struct kvs_cuda_scope *scope)
{
	kvs_cuda_leave(scope);
	pthread_mutex_unlock(&memory->lock);
}

bool kvs_cuda_memory_check(struct kvs_cuda_memory *memory, const struct kvs_plan *plan, enum kvs_side side,
                           uint32_t component, struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	bool source = side == KVS_SIDE_SOURCE, ok = true;
	if (memory == NULL)
		return true;
	if (!begin_check(memory, &scope, text))
		return false;
	for (uint32_t i = 0; i < plan->copy_count && ok; i++) {
		const struct kvs_copy *copy = &plan->copies[i];
		const struct kvs_tensor *tensor =
		        &memory->layout->components[component].tensors[source ? copy->src_tensor : copy->dst_tensor];
		for (uint32_t p = 0; p < plan->pair_count && ok; p++) {
			uint64_t item = source ? plan->pairs[p].src : plan->pairs[p].dst;
			ok = check_range(memory, tensor->address + item * tensor->item_len, tensor->item_len, text);
		}
	}
	end_check(memory, &scope);
	return ok;
}

bool kvs_cuda_memory_check_items(struct kvs_cuda_memory *memory, uint32_t component, const int32_t *items,
                                 uint32_t count, struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	bool ok = true;
	if (memory == NULL || component >= memory->layout->component_count)
		return true;
	if (!begin_check(memory, &scope, text))
		return false;
	const struct kvs_component *all = &memory->layout->components[component];
	for (uint32_t t = 0; t < all->tensor_count && ok; t++) {
		const struct kvs_tensor *tensor = &all->tensors[t];
		for (uint32_t i = 0; i < count && tensor->item_len != 0 && tensor->length != 0 && ok; i++)
			ok = check_range(memory, tensor->address + (uint64_t)items[i] * tensor->item_len,
			                 tensor->item_len, text);
	}
	end_check(memory, &scope);
	return ok;
}

bool kvs_cuda_memory_renew(struct kvs_cuda_memory *memory, struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	pthread_mutex_lock(&memory->lock);
	struct kvs_cuda_memory fresh = {.gpu = memory->gpu, .layout = memory->layout};
	bool ok = kvs_cuda_enter(&scope, memory->gpu->cuda, memory->gpu->context, text);
	if (ok) {
		ok = look(&fresh, text);
		kvs_cuda_leave(&scope);
	}
	if (ok) {
		free(memory->allocations);
		memory->allocations = fresh.allocations;
		memory->count = fresh.count;
		memory->capacity = fresh.capacity;
		memory->epoch++;
		memory->stamp++;
	} else {
		free(fresh.allocations);
	}
	pthread_mutex_unlock(&memory->lock);
	return ok;
}

bool kvs_cuda_memory_renew_if_changed(struct kvs_cuda_memory *memory, struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	struct kvs_text ignored;
	bool same = true;
	if (!begin_check(memory, &scope, text))
		return false;
	for (uint32_t i = 0; i < memory->count && same; i++)
		same = kvs_cuda_allocation_same(memory, &memory->allocations[i], &ignored);
	end_check(memory, &scope);
	return same || kvs_cuda_memory_renew(memory, text);
}

uint64_t kvs_cuda_memory_epoch(struct kvs_cuda_memory *memory)
{
	if (memory == NULL)
		return 0;
	pthread_mutex_lock(&memory->lock);
	uint64_t epoch = memory->epoch;
	pthread_mutex_unlock(&memory->lock);
	return epoch;
}
