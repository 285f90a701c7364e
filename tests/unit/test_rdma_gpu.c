/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rdma transport with GPU memory at both ends: the double of the CUDA driver beside that of libibverbs, which takes
 * a descriptor only for the memory that it belongs to.
 */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "doubles/cuda/control.h"
#include "doubles/verbs/double.h"
#include "support/agent_fleet.h"
#include "transport/cuda_types.h"

#define EVERY_CALL(X) \
	X(Init, (unsigned flags)) \
	X(DevicePrimaryCtxRetain, (void **context_p, int device)) \
	X(CtxSetCurrent, (void *context)) \
	X(MemAlloc, (uint64_t * pointer_p, size_t size)) \
	X(MemAllocManaged, (uint64_t * pointer_p, size_t size, unsigned flags)) \
	X(MemFree, (uint64_t pointer)) \
	X(MemCreate, \
	  (uint64_t * handle_p, size_t size, const struct kvs_cu_allocation_prop *prop, unsigned long long flags)) \
	X(MemAddressReserve, \
	  (uint64_t * pointer_p, size_t size, size_t alignment, uint64_t hint, unsigned long long flags)) \
	X(MemMap, (uint64_t pointer, size_t size, size_t offset, uint64_t handle, unsigned long long flags)) \
	X(MemUnmap, (uint64_t pointer, size_t size)) \
	X(MemRelease, (uint64_t handle)) \
	X(MemSetAccess, (uint64_t pointer, size_t size, const struct kvs_cu_access *access, size_t count))

static struct {
#define X(name, parameters) unsigned(*name) parameters;
	EVERY_CALL(X)
#undef X
	uint64_t (*calls)(const char *name);
	int (*fault)(const char *list);
} cuda;

static struct verbs_double *verbs;

/* What every rank's memory is. */
static enum {
	ALLOCATED,
	SHIFTED, /* does not begin where a page does */
	MAPPED,  /* of parts of 2 MiB */
	MANAGED,
} kind;

#define SHIFT  2560u
#define PART   (2u << 20)
#define VICTIM (2 * 6 + 3) /* the fourth tensor of the decode, after those of two prefill ranks */

static struct {
	uint64_t address;
	size_t size;
} allocated[64];
static int allocated_count;

static const struct kvs_cu_allocation_prop device_prop = {.type = KVS_CU_ALLOCATION_PINNED,
                                                          .handle_types = KVS_CU_HANDLE_POSIX_FD,
                                                          .location = {.type = KVS_CU_LOCATION_DEVICE}};
static const struct kvs_cu_access device_access = {.location = {.type = KVS_CU_LOCATION_DEVICE},
                                                   .flags = KVS_CU_ACCESS_READWRITE};

static void *allocate(size_t size)
{
	uint64_t address = 0, handle;
	size_t parts = (size + PART - 1) / PART;
	unsigned result = 0;
	switch (kind) {
	case ALLOCATED:
	case SHIFTED:
		result = cuda.MemAlloc(&address, size + SHIFT);
		address += kind == SHIFTED ? SHIFT : 0;
		break;
	case MANAGED:
		result = cuda.MemAllocManaged(&address, size, 1);
		break;
	case MAPPED:
		result = cuda.MemAddressReserve(&address, parts * PART, 0, 0, 0);
		for (size_t i = 0; i < parts && result == 0; i++) {
			result = cuda.MemCreate(&handle, PART, &device_prop, 0);
			result = result != 0 ? result : cuda.MemMap(address + i * PART, PART, 0, handle, 0);
			result = result != 0 ? result : cuda.MemRelease(handle);
		}
		result = result != 0 ? result : cuda.MemSetAccess(address, parts * PART, &device_access, 1);
		break;
	}
	cr_assert(result == 0, "%u", result);
	if (allocated_count < 64) {
		allocated[allocated_count].address = address;
		allocated[allocated_count++].size = size;
	}
	return (void *)(uintptr_t)address;
}

/* Mapped memory ends with the process: the size is not known here. */
static void release(void *memory)
{
	if (kind != MAPPED)
		cr_expect(cuda.MemFree((uint64_t)(uintptr_t)memory - (kind == SHIFTED ? SHIFT : 0)) == 0);
}

static void *get(void *library, const char *name)
{
	char symbol[64];
	void *found = NULL;
	static const char *const suffixes[] = {"_v2", ""};
	for (int i = 0; i < 2 && found == NULL; i++) {
		(void)snprintf(symbol, sizeof(symbol), "%s%s", name, suffixes[i]);
		found = dlsym(library, symbol);
	}
	cr_assert(found != NULL, "%s", name);
	return found;
}

static void load(void)
{
	void *symbol, *context, *library;
	if (getenv("KVS_TEST_VERBS") != NULL)
		cr_skip("only doubles have GPU memory everywhere");
	/* Both processes look at all of the memory. */
	setenv("KVS_DOUBLE_CUDA_HOST_ACCESS", "1", 1);
	library = dlopen(KVS_CUDA_DOUBLE, RTLD_NOW | RTLD_GLOBAL);
	cr_assert(library != NULL, "%s", dlerror());
#define X(name, parameters) \
	symbol = get(library, "cu" #name); \
	memcpy(&cuda.name, &symbol, sizeof(symbol));
	EVERY_CALL(X)
#undef X
	symbol = get(library, "kvs_double_cuda_calls");
	memcpy(&cuda.calls, &symbol, sizeof(symbol));
	symbol = get(library, "kvs_double_cuda_fault");
	memcpy(&cuda.fault, &symbol, sizeof(symbol));
	cr_assert(cuda.Init(0) == 0 && cuda.DevicePrimaryCtxRetain(&context, 0) == 0 &&
	          cuda.CtxSetCurrent(context) == 0);
	library = dlopen(KVS_VERBS_DOUBLE, RTLD_NOW | RTLD_GLOBAL);
	cr_assert(library != NULL, "%s", dlerror());
	verbs = dlsym(library, "kvs_verbs_double");
	fleet_allocate = allocate;
	fleet_release = release;
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma,tcp";
}

TestSuite(rdma_gpu, .init = load, .timeout = 120);

static const struct fleet_shape down = {2, 1, 8, 3, 16, 40, 3, 128, 128};
static const struct fleet_shape up = {1, 2, 8, 3, 16, 40, 3, 128, 128};

static void expect_rooms(const struct fleet_shape *shape, const char *route)
{
	struct fleet *fleet = fleet_start(shape);
	fleet_fill(fleet);
	for (uint32_t room = 0; room < shape->rooms; room++) {
		cr_expect(fleet_transfer(fleet, room));
		cr_expect(fleet_wrong(fleet, room) == 0, "room %u: %llu bytes wrong", room,
		          (unsigned long long)fleet_wrong(fleet, room));
	}
	cr_expect(fleet_strayed(fleet) == 0);
	cr_expect(fleet_log_count(route) == shape->rooms * shape->decode_tp, "%s: %u lines", route,
	          fleet_log_count(route));
	fleet_stop(fleet);
	cr_expect(verbs->shared->registered == 0, "%d regions are left", verbs->shared->registered);
	cr_expect(verbs->shared->queue_pairs == 0);
	cr_expect(verbs->shared->write_rights == 0);
}

#define OVER_RDMA "done: route=rdma components=1"

Test(rdma_gpu, by_descriptor)
{
	expect_rooms(&down, OVER_RDMA);
	/* All but the slots, which are host memory. */
	cr_expect(verbs->shared->by_descriptor == 3 * 6, "%d", verbs->shared->by_descriptor);
	fleet_log_clear();
	expect_rooms(&up, OVER_RDMA);
	cr_expect(verbs->shared->by_descriptor == 6 * 6);
	cr_expect(verbs->shared->registrations == 6 * 6 + 2, "%d", verbs->shared->registrations);
}

Test(rdma_gpu, not_at_a_page)
{
	kind = SHIFTED;
	expect_rooms(&down, OVER_RDMA);
	cr_expect(verbs->shared->by_descriptor == 3 * 6);
	fleet_log_clear();
	expect_rooms(&up, OVER_RDMA);
}

Test(rdma_gpu, mapped_in_parts)
{
	/* Tensors of 3 parts: one registration for each, and items that straddle them. */
	static const struct fleet_shape shape = {2, 1, 8, 1, 16, 120, 3, 264, 264};
	kind = MAPPED;
	expect_rooms(&shape, OVER_RDMA);
	cr_expect(verbs->shared->by_descriptor > 3 * 2, "%d", verbs->shared->by_descriptor);
}

Test(rdma_gpu, peer_memory)
{
	verbs->device.no_dmabuf = true;
	verbs->device.peer_memory = true;
	expect_rooms(&down, OVER_RDMA);
	cr_expect(verbs->shared->by_descriptor == 0 && verbs->shared->registrations == 3 * 6);
	/* The driver has no descriptor to give. */
	verbs->device.no_dmabuf = false;
	setenv("KVS_DOUBLE_CUDA_DMA_BUF", "0", 1);
	fleet_log_clear();
	expect_rooms(&up, OVER_RDMA);
	cr_expect(verbs->shared->by_descriptor == 0);
}

Test(rdma_gpu, neither)
{
	verbs->device.no_dmabuf = true;
	expect_rooms(&down, "done: route=tcp");
	cr_expect(fleet_log_count("dma-buf: ibv_reg_dmabuf_mr: Operation not supported") > 0);
	cr_expect(fleet_log_count("peer memory: Bad address (load nvidia_peermem)") > 0);
}

Test(rdma_gpu, the_driver_refuses)
{
	cuda.fault("cuMemGetHandleForAddressRange=801@3");
	expect_rooms(&down, "done: route=tcp");
	cr_expect(fleet_log_count("dma-buf: cuMemGetHandleForAddressRange: ") > 0);
}

Test(rdma_gpu, managed)
{
	/* A device would take its addresses, and keep the pages when the driver moves them. */
	verbs->device.peer_memory = true;
	kind = MANAGED;
	expect_rooms(&down, "done: route=tcp");
	cr_expect(fleet_log_count("is managed memory, which the driver moves") > 0);
	cr_expect(verbs->shared->registrations == 0);
}

/* ---- other pages at the same addresses, as a server that was paused and resumed has them ---- */

static void replace(uint64_t address, uint64_t length)
{
	uint64_t handle;
	for (uint64_t at = 0; at < length; at += PART) {
		cr_assert(cuda.MemUnmap(address + at, PART) == 0 &&
		          cuda.MemCreate(&handle, PART, &device_prop, 0) == 0);
		cr_assert(cuda.MemMap(address + at, PART, 0, handle, 0) == 0 && cuda.MemRelease(handle) == 0);
	}
	uint64_t size = (length + PART - 1) / PART * PART;
	cr_assert(cuda.MemSetAccess(address, size, &device_access, 1) == 0);
}

static void expect_room(struct fleet *fleet, uint32_t room)
{
	cr_expect(fleet_transfer(fleet, room));
	cr_expect(fleet_wrong(fleet, room) == 0, "room %u: %llu bytes wrong", room,
	          (unsigned long long)fleet_wrong(fleet, room));
}

Test(rdma_gpu, replaced_at_the_prefill)
{
	kind = MAPPED;
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma";
	struct fleet *fleet = fleet_start(&down);
	fleet_fill(fleet);
	expect_room(fleet, 0);
	int registered = verbs->shared->registered, registrations = verbs->shared->registrations;
	const struct kvs_tensor *tensor = &fleet->prefill[1]->components[0].tensors[2];
	replace(tensor->address, tensor->length);
	fleet_fill(fleet); /* the decode's memory is canary again */
	expect_room(fleet, 1);
	cr_expect(verbs->shared->registrations > registrations);
	expect_room(fleet, 2);
	cr_expect(verbs->shared->registered == registered, "%d regions, %d before", verbs->shared->registered,
	          registered);
	fleet_stop(fleet);
	cr_expect(verbs->shared->registered == 0);
}

/* The decode's own thread, on a word from the test. */
static struct {
	atomic_int go;
} * order;
static void *replacer(void *unused)
{
	void *context;
	(void)unused;
	cr_assert(cuda.DevicePrimaryCtxRetain(&context, 0) == 0 && cuda.CtxSetCurrent(context) == 0);
	while (order->go != 1)
		usleep(1000);
	replace(allocated[VICTIM].address, allocated[VICTIM].size);
	order->go = 2;
	return NULL;
}

static void child_replaces(void)
{
	pthread_t thread;
	cr_assert(pthread_create(&thread, NULL, replacer, NULL) == 0);
	pthread_detach(thread);
}

/* What is in the decode's own pages now, put into those that the test can see. */
static void fetch(const struct fleet *fleet, const struct kvs_tensor *tensor)
{
	struct iovec range = {.iov_base = (void *)(uintptr_t)tensor->address, .iov_len = tensor->length};
	cr_assert(process_vm_readv(fleet->child, &range, 1, &range, 1, 0) == (ssize_t)tensor->length);
}

Test(rdma_gpu, replaced_at_the_decode)
{
	order = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	cr_assert(order != MAP_FAILED);
	kind = MAPPED;
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma";
	fleet_child_setup = child_replaces;
	struct fleet *fleet = fleet_start(&down);
	fleet_fill(fleet);
	expect_room(fleet, 0);
	int registered = verbs->shared->registered, registrations = verbs->shared->registrations;
	order->go = 1;
	while (order->go != 2)
		usleep(1000);
	cr_expect(fleet_transfer(fleet, 1));
	const struct kvs_tensor *tensor = &fleet->decode[0]->components[0].tensors[3];
	cr_assert(tensor->address == allocated[VICTIM].address);
	fetch(fleet, tensor);
	cr_expect(fleet_wrong(fleet, 1) == 0, "%llu bytes wrong", (unsigned long long)fleet_wrong(fleet, 1));
	cr_expect(verbs->shared->registrations > registrations);
	cr_expect(verbs->shared->registered == registered, "%d regions, %d before", verbs->shared->registered,
	          registered);
	fleet_stop(fleet);
	cr_expect(verbs->shared->registered == 0);
}

/* ---- the order of writes ---- */

/* Calls in the decode's process: told through memory that both have. */
static atomic_ullong *flushes;

static unsigned long long flushes_before;

static void count_flushes(void)
{
	*flushes = cuda.calls("cuFlushGPUDirectRDMAWrites") - flushes_before;
}

static void child_counts(void)
{
	flushes_before = cuda.calls("cuFlushGPUDirectRDMAWrites");
	(void)atexit(count_flushes);
}

static void watch_flushes(void)
{
	flushes = (atomic_ullong *)allocate(4096);
	*flushes = 99;
	fleet_child_setup = child_counts;
}

Test(rdma_gpu, flushed)
{
	watch_flushes();
	setenv("KVS_DOUBLE_CUDA_RDMA_ORDER", "0", 1);
	expect_rooms(&down, OVER_RDMA);
	/* Once for each pull, never for each READ. */
	cr_expect(*flushes == 3 * 2, "%llu", *flushes);
}

Test(rdma_gpu, in_order_by_itself)
{
	watch_flushes();
	expect_rooms(&down, OVER_RDMA);
	cr_expect(*flushes == 0, "%llu", *flushes);
}

Test(rdma_gpu, no_order_and_no_flush)
{
	setenv("KVS_DOUBLE_CUDA_RDMA_ORDER", "0", 1);
	setenv("KVS_DOUBLE_CUDA_RDMA_FLUSH", "2", 1);
	expect_rooms(&down, "done: route=tcp");
	cr_expect(fleet_log_count("the GPU does not see what network cards write in order") > 0);
}

static void child_flush_fails(void)
{
	cuda.fault("cuFlushGPUDirectRDMAWrites=999@2");
}

Test(rdma_gpu, flush_fails)
{
	setenv("KVS_DOUBLE_CUDA_RDMA_ORDER", "0", 1);
	fleet_child_setup = child_flush_fails;
	struct fleet *fleet = fleet_start(&down);
	fleet_fill(fleet);
	for (uint32_t room = 0; room < 2; room++) {
		cr_expect(fleet_transfer(fleet, room));
		cr_expect(fleet_wrong(fleet, room) == 0);
	}
	cr_expect(fleet_log_count("cuFlushGPUDirectRDMAWrites: ") > 0);
	fleet_stop(fleet);
}
