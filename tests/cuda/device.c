/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "../../transport/cuda_wake.h"
#include "../../transport/staging.h"

#define SPINS  200
#define ASK_NS 30000000000u

static struct driver driver;

static void *find(void *library, const char *name, bool needed)
{
	char versioned[96];
	(void)snprintf(versioned, sizeof(versioned), "%s_v2", name);
	void *found = dlsym(library, versioned);
	found = found == NULL ? dlsym(library, name) : found;
	CHECK(found != NULL || !needed, "%s", name);
	return found;
}

#define FIND(name) \
	do { \
		void *found = find(library, "cu" #name, true); \
		memcpy(&driver.name, &found, sizeof(found)); \
	} while (0)

const struct driver *driver_start(int device)
{
	kvs_cu_device number;
	struct kvs_text text;
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (library == NULL)
		SKIP("no CUDA driver: %s", dlerror());
	FIND(Init);
	FIND(CtxSetCurrent);
	FIND(CtxGetCurrent);
	FIND(MemcpyHtoD);
	FIND(MemcpyDtoH);
	FIND(MemsetD8);
	FIND(MemAllocAsync);
	FIND(MemAllocManaged);
	FIND(MemCreate);
	FIND(MemGetAllocationGranularity);
	FIND(StreamBeginCapture);
	FIND(StreamEndCapture);
	FIND(GraphDestroy);
	FIND(MemcpyDtoDAsync);
#define X(name, type, parameters) \
	do { \
		void *found = find(library, "kvs_double_cuda_" #name, false); \
		memcpy(&driver.name, &found, sizeof(found)); \
	} while (0);
	KVS_DOUBLE_CONTROL(X)
#undef X
	unsigned result = driver.Init(0);
	if (result != 0)
		SKIP("cuInit says %u", result);
	driver.cuda = kvs_cuda_get(&text);
	CHECK(driver.cuda != NULL, "%s", text.s);
	if (driver.cuda->DeviceGet(&number, device) != 0)
		SKIP("no GPU %d", device);
	static kvs_cu_context contexts[16];
	if (contexts[device] == NULL)
		CHECK(driver.cuda->DevicePrimaryCtxRetain(&contexts[device], number) == 0);
	CHECK(driver.CtxSetCurrent(contexts[device]) == 0);
	return &driver;
}

void need_double(const struct driver *d)
{
	if (d->fault == NULL)
		SKIP("needs the double of the driver");
}

static struct kvs_cu_allocation_prop prop_of(const struct block *block)
{
	unsigned types = block->kind == KVS_CUDA_VMM      ? KVS_CU_HANDLE_POSIX_FD
	                 : block->kind == KVS_CUDA_FABRIC ? KVS_CU_HANDLE_FABRIC
	                                                  : 0;
	return (struct kvs_cu_allocation_prop){.type = KVS_CU_ALLOCATION_PINNED,
	                                       .handle_types = types,
	                                       .location = {KVS_CU_LOCATION_DEVICE, block->device}};
}

void block_resume(const struct driver *d, struct block *block)
{
	struct kvs_cu_allocation_prop prop = prop_of(block);
	struct kvs_cu_access access = {.location = prop.location, .flags = KVS_CU_ACCESS_READWRITE};
	size_t part = block->reserved / block->parts;
	for (uint32_t i = 0; i < block->parts; i++) {
		uint64_t handle;
		unsigned result = d->MemCreate(&handle, part, &prop, 0);
		if (result != 0 && block->kind == KVS_CUDA_FABRIC)
			SKIP("no fabric handles here (%u)", result);
		CHECK(result == 0, "%u", result);
		CHECK(d->cuda->MemMap(block->address + i * part, part, 0, handle, 0) == 0);
		CHECK(d->cuda->MemRelease(handle) == 0);
	}
	CHECK(d->cuda->MemSetAccess(block->address, block->reserved, &access, 1) == 0);
}

void block_pause(const struct driver *d, struct block *block)
{
	size_t part = block->reserved / block->parts;
	for (uint32_t i = 0; i < block->parts; i++)
		CHECK(d->cuda->MemUnmap(block->address + i * part, part) == 0);
}

struct block block_new(const struct driver *d, int device, enum kvs_cuda_kind kind, size_t size, uint32_t parts)
{
	struct block block = {.kind = kind, .device = device, .size = size, .parts = parts};
	struct kvs_cu_allocation_prop prop = prop_of(&block);
	size_t granularity = 0;
	unsigned result = 0;
	switch (kind) {
	case KVS_CUDA_HOST:
		block.address = (uintptr_t)calloc(1, size);
		break;
	case KVS_CUDA_LEGACY:
		result = d->cuda->MemAlloc((kvs_cu_pointer *)&block.address, size);
		break;
	case KVS_CUDA_POOL:
		result = d->MemAllocAsync(&block.address, size, NULL);
		break;
	case KVS_CUDA_MANAGED:
		result = d->MemAllocManaged(&block.address, size, 1);
		break;
	case KVS_CUDA_VMM:
	case KVS_CUDA_FABRIC:
	case KVS_CUDA_PRIVATE:
		CHECK(d->MemGetAllocationGranularity(&granularity, &prop, 0) == 0);
		granularity *= parts;
		block.reserved = (size + granularity - 1) / granularity * granularity;
		CHECK(d->cuda->MemAddressReserve((kvs_cu_pointer *)&block.address, block.reserved, 0, 0, 0) == 0);
		block_resume(d, &block);
		break;
	}
	CHECK(result == 0 && block.address != 0, "allocation of kind %d: %u", (int)kind, result);
	return block;
}

void block_free(const struct driver *d, struct block *block)
{
	if (block->reserved != 0) {
		block_pause(d, block);
		CHECK(d->cuda->MemAddressFree(block->address, block->reserved) == 0);
	} else if (block->kind == KVS_CUDA_HOST) {
		free((void *)(uintptr_t)block->address);
	} else {
		CHECK(d->cuda->MemFree(block->address) == 0);
	}
	block->address = 0;
}

static uint64_t now_ns(void)
{
	struct timespec now;
	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

bool engine_wait(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	uint64_t seen = engine->wakes, asked = now_ns();
	while (engine->running) {
		for (int i = 0; i < SPINS && kvs_cuda_wakes() == seen; i++)
			kvs_pause();
		/* A GPU that has failed does not call: then it is asked. */
		if (kvs_cuda_wakes() == seen && now_ns() - asked < ASK_NS) {
			sched_yield();
			continue;
		}
		seen = kvs_cuda_wakes();
		asked = now_ns();
		if (!kvs_cuda_engine_poll(engine, text))
			return false;
	}
	return true;
}

uint64_t engine_calls(const struct driver *d, struct kvs_cuda_engine *engine, const struct kvs_plan *plan)
{
	struct kvs_text text = {.s = ""};
	uint64_t before = d->calls(NULL);
	CHECK(kvs_cuda_engine_begin(engine, plan, KVS_GPU_DIRECT, NULL, KVS_CUDA_METHOD_KERNEL, &text), "%s", text.s);
	engine->piece = (uint64_t)4 << 30;
	CHECK(kvs_cuda_engine_launch(engine, &text), "%s", text.s);
	uint64_t calls = d->calls(NULL) - before;
	CHECK(d->cuda->StreamSynchronize(engine->stream) == 0); /* stands for the wake-up, so that one look is enough */
	before = d->calls(NULL);
	CHECK(kvs_cuda_engine_poll(engine, &text), "%s", text.s);
	CHECK(!engine->running && engine->position == plan->bytes);
	return calls + d->calls(NULL) - before;
}

bool engine_step(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	return kvs_cuda_engine_launch(engine, text) && engine_wait(engine, text);
}

void device_write(const struct driver *d, uint64_t to, const void *from, size_t size)
{
	CHECK(d->MemcpyHtoD(to, from, size) == 0);
}

void device_read(const struct driver *d, void *to, uint64_t from, size_t size)
{
	CHECK(d->MemcpyDtoH(to, from, size) == 0);
}
