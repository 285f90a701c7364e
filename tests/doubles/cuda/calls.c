/* SPDX-License-Identifier: Apache-2.0 */
/* Counting, faults, versions, and the tables that name every function. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "double.h"

#define FAULTS 32

struct call_row {
	const char *name;
	const char *suffix;
	enum safety safety;
};

static const struct call_row rows[CALL_COUNT] = {
#define X(name, suffix, safety) {"cu" #name, suffix, safety},
        CALLS(X)
#undef X
};

struct fault {
	char name[48];
	unsigned error;
	unsigned countdown; /* 0: spent */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[FAULTS];
static _Atomic uint64_t counts[CALL_COUNT];
static _Atomic unsigned delay_us;
static _Atomic bool initialized;
static int version = 12040;

EXPORT int kvs_double_cuda_fault(const char *list)
{
	char copy[1024];
	char *save = NULL;
	(void)snprintf(copy, sizeof(copy), "%s", list);
	for (char *entry = strtok_r(copy, ",", &save); entry != NULL; entry = strtok_r(NULL, ",", &save)) {
		char *equals = strchr(entry, '='), *at = strchr(entry, '@');
		if (equals == NULL)
			return 1;
		*equals = '\0';
		pthread_mutex_lock(&lock);
		for (int i = 0; i < FAULTS; i++) {
			if (faults[i].countdown != 0)
				continue;
			(void)snprintf(faults[i].name, sizeof(faults[i].name), "%s", entry);
			faults[i].error = (unsigned)strtoul(equals + 1, NULL, 10);
			faults[i].countdown = at == NULL ? 1 : (unsigned)strtoul(at + 1, NULL, 10);
			break;
		}
		pthread_mutex_unlock(&lock);
	}
	return 0;
}

unsigned fault_of(const char *name)
{
	unsigned error = OK;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < FAULTS && error == OK; i++) {
		if (faults[i].countdown != 0 && strcmp(faults[i].name, name) == 0 && --faults[i].countdown == 0)
			error = faults[i].error;
	}
	pthread_mutex_unlock(&lock);
	return error;
}

unsigned enter(enum call call)
{
	atomic_fetch_add(&counts[call], 1);
	if (call != CALL_Init && call != CALL_DriverGetVersion && call != CALL_GetErrorName && !initialized)
		return NOT_INITIALIZED;
	if (in_host_function)
		return NOT_PERMITTED;
	if (call == CALL_Init)
		initialized = true;
	unsigned error = fault_of(rows[call].name);
	if (error != OK)
		return error;
	if (capture_forbids(rows[call].safety))
		return CAPTURE_UNSUPPORTED;
	/* Once a device is lost its context is of no more use; what only asks or cleans up still answers. */
	struct CUctx_st *context = current();
	bool cleans = false;
	switch (call) {
	case CALL_CtxPopCurrent:
	case CALL_CtxPushCurrent:
	case CALL_CtxSetCurrent:
	case CALL_GetErrorName:
	case CALL_ThreadExchangeStreamCaptureMode:
	case CALL_StreamDestroy:
	case CALL_EventDestroy:
	case CALL_ModuleUnload:
	case CALL_MemFree:
	case CALL_MemFreeHost:
	case CALL_MemUnmap:
	case CALL_MemAddressFree:
	case CALL_MemRelease:
	case CALL_IpcCloseMemHandle:
	case CALL_DevicePrimaryCtxRelease:
		cleans = true;
		break;
	default:
		break;
	}
	if (context != NULL && context->error != OK && !cleans)
		return context->error;
	return OK;
}

void delay(void)
{
	if (delay_us != 0)
		usleep(delay_us);
}

EXPORT void kvs_double_cuda_delay(unsigned microseconds)
{
	delay_us = microseconds;
}

EXPORT uint64_t kvs_double_cuda_calls(const char *name)
{
	uint64_t sum = 0;
	for (int i = 0; i < CALL_COUNT; i++) {
		if (name == NULL || strcmp(name, rows[i].name) == 0)
			sum += counts[i];
	}
	return sum;
}

EXPORT int kvs_double_cuda_live(const char *kind)
{
	static const struct {
		const char *kind;
		int (*count)(void);
	} simple[] = {{"handles", live_handles}, {"reservations", live_reservations}, {"streams", live_streams},
	              {"events", live_events},   {"modules", live_modules},           {"retained", live_retained},
	              {"pushed", live_pushed}};
	for (size_t i = 0; i < sizeof(simple) / sizeof(simple[0]); i++) {
		if (strcmp(kind, simple[i].kind) == 0)
			return simple[i].count();
	}
	if (strcmp(kind, "allocations") == 0)
		return live_ranges(RANGE_LEGACY, false) + live_ranges(RANGE_POOL, false);
	if (strcmp(kind, "host") == 0)
		return live_ranges(RANGE_HOST, false);
	if (strcmp(kind, "mappings") == 0)
		return live_ranges(RANGE_VMM, false);
	if (strcmp(kind, "ipc") == 0)
		return live_ranges(RANGE_IPC, false);
	return -1;
}

static unsigned number(const char *name, unsigned otherwise)
{
	const char *value = getenv(name);
	return value == NULL ? otherwise : (unsigned)strtoul(value, NULL, 10);
}

__attribute__((constructor)) static void begin(void)
{
	const char *list = getenv("KVS_DOUBLE_CUDA_FAULT");
	if (list != NULL && kvs_double_cuda_fault(list) != 0)
		fprintf(stderr, "double of libcuda: KVS_DOUBLE_CUDA_FAULT is not understood: %s\n", list);
	delay_us = number("KVS_DOUBLE_CUDA_DELAY_US", 0);
	version = (int)number("KVS_DOUBLE_CUDA_VERSION", 12040);
	host_access = number("KVS_DOUBLE_CUDA_HOST_ACCESS", 0) != 0;
}

/* ---- the driver's own ---- */

unsigned cuInit(unsigned flags);
EXPORT unsigned cuInit(unsigned flags)
{
	ENTER(Init);
	return flags == 0 ? OK : INVALID_VALUE;
}

unsigned cuDriverGetVersion(int *version_p);
EXPORT unsigned cuDriverGetVersion(int *version_p)
{
	ENTER(DriverGetVersion);
	*version_p = version;
	return OK;
}

unsigned cuGetErrorName(unsigned error, const char **name_p);
EXPORT unsigned cuGetErrorName(unsigned error, const char **name_p)
{
	static const struct {
		unsigned error;
		const char *name;
	} names[] = {{OK, "CUDA_SUCCESS"},
	             {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
	             {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
	             {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
	             {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
	             {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
	             {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
	             {PEER_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
	             {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
	             {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
	             {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
	             {719, "CUDA_ERROR_LAUNCH_FAILED"},
	             {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED"},
	             {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
	             {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
	             {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}};
	ENTER(GetErrorName);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (names[i].error == error) {
			*name_p = names[i].name;
			return OK;
		}
	}
	return INVALID_VALUE;
}

unsigned cuGetProcAddress_v2(const char *name, void **function_p, int wanted, uint64_t flags, unsigned *status_p);
EXPORT unsigned cuGetProcAddress_v2(const char *name, void **function_p, int wanted, uint64_t flags, unsigned *status_p)
{
	char symbol[96];
	const char *missing = getenv("KVS_DOUBLE_CUDA_MISSING");
	(void)flags;
	(void)wanted;
	*function_p = NULL;
	for (int i = 0; i < CALL_COUNT; i++) {
		if (strcmp(name, rows[i].name) != 0 || (missing != NULL && strcmp(name, missing) == 0))
			continue;
		(void)snprintf(symbol, sizeof(symbol), "%s%s", name, rows[i].suffix);
		Dl_info self;
		void *own = dladdr((void *)cuInit, &self) != 0 ? dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
		*function_p = own == NULL ? NULL : dlsym(own, symbol);
		if (own != NULL)
			dlclose(own);
	}
	if (status_p != NULL)
		*status_p = *function_p == NULL ? 1 : 0;
	return *function_p == NULL ? NOT_FOUND : OK;
}
