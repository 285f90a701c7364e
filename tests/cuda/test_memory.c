/* SPDX-License-Identifier: Apache-2.0 */
/* Driver access, the kinds of memory, and noticing that memory has changed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "../../transport/cuda_exports.h"
#include "model.h"

static const struct shape small = {.layers = 2, .heads = 4, .page = 4, .items = 8, .k_width = 32, .v_width = 32};

/* 8 MiB */
static const struct shape spread = {.layers = 2, .heads = 4, .page = 4, .items = 8, .k_width = 8192, .v_width = 8192};

static struct kvs_cuda_memory *look(const struct rank *rank)
{
	struct kvs_cuda_memory *memory = NULL;
	struct kvs_text text = {.s = ""};
	CHECK(kvs_cuda_memory_new(rank->layout, &memory, &text), "%s", text.s);
	return memory;
}

static void host_memory(void)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &small, 1, 0, 0, KVS_CUDA_HOST, 1, 0);
	CHECK(look(&rank) == NULL);
	rank_free(driver, &rank);
}

static void kind_is(enum kvs_cuda_kind kind, uint32_t parts, bool shared)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &spread, 1, 0, 0, kind, parts, 0);
	struct kvs_cuda_memory *memory = look(&rank);
	struct kvs_text reason = {.s = ""};
	size_t part = rank.block.reserved / parts;
	uint32_t expected = part == 0 ? 1 : (uint32_t)((rank.size + part - 1) / part);
	CHECK(memory != NULL && memory->count == expected, "%u allocations", memory == NULL ? 0 : memory->count);
	for (uint32_t i = 0; i < memory->count; i++)
		CHECK(memory->allocations[i].kind == kind &&
		              memory->allocations[i].extent == (kvs_cuda_kind_mapped(kind) ? 0 : i),
		      "%s", kvs_cuda_kind_name(memory->allocations[i].kind));
	CHECK(kvs_cuda_memory_private(memory, &reason) == !shared);
	if (!shared)
		CHECK(strstr(reason.s, "cannot be shared") != NULL, "%s", reason.s);
	kvs_cuda_memory_free(memory);
	rank_free(driver, &rank);
	if (driver->live != NULL)
		CHECK(driver->live("handles") == 0 && driver->live("modules") == 0 && driver->live("retained") == 1);
}

static void kind_legacy(void)
{
	kind_is(KVS_CUDA_LEGACY, 1, true);
}

static void kind_vmm(void)
{
	kind_is(KVS_CUDA_VMM, 1, true);
}

/* Report C1: an expandable segment is many physical allocations, none of which a legacy handle exists for. */
static void kind_vmm_of_many_handles(void)
{
	kind_is(KVS_CUDA_VMM, 3, true);
}

static void kind_private(void)
{
	kind_is(KVS_CUDA_PRIVATE, 2, false);
}

static void kind_fabric(void)
{
	kind_is(KVS_CUDA_FABRIC, 2, true);
}

static void kind_pool(void)
{
	kind_is(KVS_CUDA_POOL, 1, false);
}

static void kind_managed(void)
{
	kind_is(KVS_CUDA_MANAGED, 1, false);
}

static void past_the_end(void)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &small, 1, 0, 0, KVS_CUDA_VMM, 1, 0);
	struct kvs_cuda_memory *memory = NULL;
	struct kvs_text text = {.s = ""};
	struct kvs_tensor *last = &rank.layout->components[1].tensors[3];
	last->length += 4 * rank.block.reserved;
	CHECK(!kvs_cuda_memory_new(rank.layout, &memory, &text) && memory == NULL);
	CHECK(strstr(text.s, "component 1 tensor 3") != NULL, "%s", text.s);
	rank_free(driver, &rank);
}

static void two_devices(void)
{
	const struct driver *driver = driver_start(1);
	struct rank other = rank_new(driver, &small, 1, 0, 1, KVS_CUDA_LEGACY, 1, 0);
	driver_start(0);
	struct rank rank = rank_new(driver, &small, 1, 0, 0, KVS_CUDA_LEGACY, 1, 0);
	struct kvs_cuda_memory *memory = NULL;
	struct kvs_text text = {.s = ""};
	rank.layout->components[1].tensors[0].address = other.layout->components[1].tensors[0].address;
	CHECK(!kvs_cuda_memory_new(rank.layout, &memory, &text));
	CHECK(strstr(text.s, "GPU 1") != NULL && strstr(text.s, "GPU 0") != NULL, "%s", text.s);
	rank_free(driver, &rank);
	rank_free(driver, &other);
}

/* Pages that come back at the same address are others, and are noticed only where they are touched. */
static void replaced(void)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &small, 1, 0, 0, KVS_CUDA_VMM, 1, 0);
	struct kvs_cuda_memory *memory = look(&rank);
	struct kvs_text text = {.s = ""};
	int32_t items[] = {1, 5};
	CHECK(kvs_cuda_memory_check_items(memory, 0, items, 2, &text), "%s", text.s);
	block_pause(driver, &rank.block);
	CHECK(!kvs_cuda_memory_check_items(memory, 0, items, 2, &text));
	CHECK(strstr(text.s, "freed or paused") != NULL, "%s", text.s);
	CHECK(!kvs_cuda_memory_renew(memory, &text) && kvs_cuda_memory_epoch(memory) == 1);
	block_resume(driver, &rank.block);
	CHECK(!kvs_cuda_memory_check_items(memory, 0, items, 2, &text));
	CHECK(strstr(text.s, "replaced") != NULL, "%s", text.s);
	CHECK(kvs_cuda_memory_renew(memory, &text), "%s", text.s);
	CHECK(kvs_cuda_memory_epoch(memory) == 2);
	CHECK(kvs_cuda_memory_check_items(memory, 0, items, 2, &text), "%s", text.s);
	kvs_cuda_memory_free(memory);
	rank_free(driver, &rank);
	if (driver->live != NULL)
		CHECK(driver->live("handles") == 0);
}

static void freed(void)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &small, 1, 0, 0, KVS_CUDA_LEGACY, 1, 0);
	struct kvs_cuda_memory *memory = look(&rank);
	struct kvs_text text = {.s = ""};
	int32_t item = 0;
	block_free(driver, &rank.block);
	CHECK(!kvs_cuda_memory_check_items(memory, 0, &item, 1, &text));
	kvs_cuda_memory_free(memory);
	kvs_layout_free(rank.layout);
}

/* A thread without a context of its own is left without one. */
static void context_is_left_alone(void)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &small, 1, 0, 0, KVS_CUDA_VMM, 1, 0);
	kvs_cu_context current = NULL;
	CHECK(driver->CtxSetCurrent(NULL) == 0);
	struct kvs_cuda_memory *memory = look(&rank);
	CHECK(driver->CtxGetCurrent(&current) == 0 && current == NULL);
	kvs_cuda_memory_free(memory);
	CHECK(driver->CtxGetCurrent(&current) == 0 && current == NULL);
	rank_free(driver, &rank);
}

/* Mapped memory belongs to no context: none is made for it on a GPU that the server has not begun to use. */
static void no_context_is_made(void)
{
	const struct driver *driver = driver_start(0);
	struct kvs_cuda_memory *memory = NULL;
	struct kvs_text text = {.s = ""};
	kvs_cu_device other;
	unsigned flags = 0;
	int active = 1;
	need_double(driver);
	CHECK(driver->cuda->DeviceGet(&other, 1) == 0);
	struct rank rank = rank_new(driver, &small, 1, 0, 1, KVS_CUDA_VMM, 1, 0);
	CHECK(!kvs_cuda_memory_new(rank.layout, &memory, &text) && memory == NULL);
	CHECK(strstr(text.s, "GPU 1 has no active context in this process") != NULL, "%s", text.s);
	CHECK(driver->cuda->DevicePrimaryCtxGetState(other, &flags, &active) == 0 && active == 0);
	CHECK(driver->calls("cuCtxCreate") == 0 && driver->live("retained") == 1);
	rank_free(driver, &rank);
}

static void old_driver(void)
{
	struct kvs_text text = {.s = ""};
	setenv("KVS_DOUBLE_CUDA_VERSION", "11080", 1);
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (library == NULL || dlsym(library, "kvs_double_cuda_fault") == NULL)
		SKIP("needs the double of the driver");
	CHECK(kvs_cuda_get(&text) == NULL);
	CHECK(strstr(text.s, "11.8") != NULL && strstr(text.s, "12.0") != NULL, "%s", text.s);
}

static void missing_function(void)
{
	struct kvs_text text = {.s = ""};
	setenv("KVS_DOUBLE_CUDA_MISSING", "cuMemMap", 1);
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (library == NULL || dlsym(library, "kvs_double_cuda_fault") == NULL)
		SKIP("needs the double of the driver");
	CHECK(kvs_cuda_get(&text) == NULL && strstr(text.s, "cuMemMap") != NULL, "%s", text.s);
}

static void not_loaded(void)
{
	struct kvs_text text = {.s = ""};
	CHECK(kvs_cuda_get(&text) == NULL && strstr(text.s, "has not loaded") != NULL, "%s", text.s);
}

/* Each call that classification makes, failing: an answer with the call's name, and nothing left. */
static void faults(void)
{
	static const char *const calls[] = {
	        "cuPointerGetAttributes",   "cuDeviceGet",          "cuDevicePrimaryCtxGetState",
	        "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent",     "cuThreadExchangeStreamCaptureMode",
	        "cuDeviceGetUuid",          "cuDeviceGetAttribute", "cuModuleLoadData",
	        "cuModuleGetFunction"};
	const struct driver *driver = driver_start(0);
	need_double(driver);
	struct rank rank = rank_new(driver, &small, 1, 0, 0, KVS_CUDA_VMM, 1, 0);
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		struct kvs_cuda_memory *memory = NULL;
		struct kvs_text text = {.s = ""};
		char list[96];
		(void)snprintf(list, sizeof(list), "%s=2", calls[i]);
		CHECK(driver->fault(list) == 0);
		CHECK(!kvs_cuda_memory_new(rank.layout, &memory, &text) && memory == NULL, "%s", calls[i]);
		CHECK(strstr(text.s, calls[i]) != NULL && strstr(text.s, "OUT_OF_MEMORY") != NULL, "%s: %s", calls[i],
		      text.s);
		CHECK(driver->live("modules") == 0 && driver->live("retained") == 1 && driver->live("handles") == 0,
		      "%s", calls[i]);
	}
	kvs_cuda_memory_free(look(&rank));
	rank_free(driver, &rank);
}

/* What a peer sends is taken for nothing before it is checked. */
static void offers_that_make_no_sense(void)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &spread, 1, 0, 0, KVS_CUDA_VMM, 2, 0);
	struct kvs_cuda_memory *memory = look(&rank);
	struct kvs_writer writer = {.data = NULL};
	struct kvs_text text = {.s = ""};
	kvs_cuda_exports_put(&writer, memory);
	CHECK(!writer.failed);
	struct kvs_cuda_exports *good = kvs_cuda_exports_get(writer.data, writer.size, rank.layout, &text);
	CHECK(good != NULL && good->count == 2 && good->extent_count == 1, "%s", text.s);
	kvs_cuda_exports_free(good);
	for (size_t size = 0; size < writer.size; size++)
		CHECK(kvs_cuda_exports_get(writer.data, size, rank.layout, &text) == NULL, "%zu bytes", size);
	uint64_t state = 1;
	uint8_t *copy = malloc(writer.size);
	for (int round = 0; round < 20000; round++) {
		memcpy(copy, writer.data, writer.size);
		for (int i = 0; i < 3; i++) {
			state = state * 6364136223846793005u + 1442695040888963407u;
			copy[(state >> 33) % writer.size] = (uint8_t)(state >> 25);
		}
		struct kvs_cuda_exports *taken = kvs_cuda_exports_get(copy, writer.size, rank.layout, &text);
		for (uint32_t t = 0; taken != NULL && t < taken->tensor_count; t++)
			CHECK(taken->tensors[t].extent < taken->extent_count);
		kvs_cuda_exports_free(taken);
	}
	free(copy);
	free(writer.data);
	kvs_cuda_memory_free(memory);
	rank_free(driver, &rank);
}

const struct test memory_tests[] = {{"memory.host", host_memory},
                                    {"memory.legacy", kind_legacy},
                                    {"memory.vmm", kind_vmm},
                                    {"memory.vmm of many handles", kind_vmm_of_many_handles},
                                    {"memory.not exportable", kind_private},
                                    {"memory.fabric", kind_fabric},
                                    {"memory.pool", kind_pool},
                                    {"memory.managed", kind_managed},
                                    {"memory.past the end", past_the_end},
                                    {"memory.two devices", two_devices},
                                    {"memory.replaced", replaced},
                                    {"memory.freed", freed},
                                    {"memory.context left alone", context_is_left_alone},
                                    {"memory.no context is made", no_context_is_made},
                                    {"memory.old driver", old_driver},
                                    {"memory.missing function", missing_function},
                                    {"memory.driver not loaded", not_loaded},
                                    {"memory.faults", faults},
                                    {"memory.offers that make no sense", offers_that_make_no_sense},
                                    {NULL, NULL}};
