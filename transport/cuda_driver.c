/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define DRIVER "libcuda.so.1"

typedef kvs_cu_result (*get_version_t)(int *version_p);
typedef kvs_cu_result (*get_address_t)(const char *name, void **function_p, int version, unsigned long long flags,
                                       unsigned *status_p);

struct entry {
	const char *name;
	size_t offset; /* in struct kvs_cuda */
};

static const struct entry entries[] = {
#define X(name, parameters) {"cu" #name, offsetof(struct kvs_cuda, name)},
        KVS_CUDA_FUNCTIONS(X)
#undef X
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvs_cuda table;
static bool ready;

static bool fill(void *driver, struct kvs_text *text)
{
	get_version_t get_version = (get_version_t)dlsym(driver, "cuDriverGetVersion");
	get_address_t get_address = (get_address_t)dlsym(driver, "cuGetProcAddress_v2");
	int version = 0;
	if (get_version == NULL || get_version(&version) != KVS_CU_SUCCESS) {
		kvs_text_set(text, "the CUDA driver does not tell its version");
		return false;
	}
	if (version < KVS_CUDA_VERSION || get_address == NULL) {
		kvs_text_set(text, "the CUDA driver is version %d.%d: %d.%d or later is needed", version / 1000,
		             version % 1000 / 10, KVS_CUDA_VERSION / 1000, KVS_CUDA_VERSION % 1000 / 10);
		return false;
	}
	for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
		void *function = NULL;
		unsigned status = 0;
		kvs_cu_result result = get_address(entries[i].name, &function, KVS_CUDA_VERSION, 0, &status);
		if (result != KVS_CU_SUCCESS || function == NULL) {
			kvs_text_set(text, "the CUDA driver %d.%d has no %s (error %u, status %u)", version / 1000,
			             version % 1000 / 10, entries[i].name, result, status);
			return false;
		}
		memcpy((char *)&table + entries[i].offset, &function, sizeof(function));
	}
	table.version = version;
	return true;
}

const struct kvs_cuda *kvs_cuda_get(struct kvs_text *text)
{
	pthread_mutex_lock(&lock);
	if (!ready) {
		/* The one that the process has: a second copy, or a driver that nobody asked for, would be ours alone.
		 * The reference is kept, so that the table stays valid. */
		void *driver = dlopen(DRIVER, RTLD_NOW | RTLD_NOLOAD);
		if (driver == NULL) {
			kvs_text_set(text, "the process has not loaded the CUDA driver (" DRIVER ")");
		} else {
			ready = fill(driver, text);
			if (!ready)
				dlclose(driver);
		}
	}
	const struct kvs_cuda *cuda = ready ? &table : NULL;
	pthread_mutex_unlock(&lock);
	return cuda;
}

const char *kvs_cuda_error_name(const struct kvs_cuda *cuda, kvs_cu_result error)
{
	const char *name = NULL;
	if (cuda->GetErrorName(error, &name) != KVS_CU_SUCCESS || name == NULL)
		return "unknown CUDA error";
	return name;
}

bool kvs_cuda_ok(const struct kvs_cuda *cuda, kvs_cu_result result, const char *call, struct kvs_text *text)
{
	if (result == KVS_CU_SUCCESS)
		return true;
	kvs_text_set(text, "%s: %s (%u)", call, kvs_cuda_error_name(cuda, result), result);
	return false;
}

bool kvs_cuda_enter(struct kvs_cuda_scope *scope, const struct kvs_cuda *cuda, kvs_cu_context context,
                    struct kvs_text *text)
{
	memset(scope, 0, sizeof(*scope));
	scope->cuda = cuda;
	scope->mode = KVS_CU_CAPTURE_MODE_RELAXED;
	if (!kvs_cuda_call(cuda, text, ThreadExchangeStreamCaptureMode, &scope->mode))
		return false;
	scope->exchanged = true;
	if (context == NULL)
		return true;
	scope->pushed = kvs_cuda_call(cuda, text, CtxPushCurrent, context);
	if (!scope->pushed)
		kvs_cuda_leave(scope);
	return scope->pushed;
}

void kvs_cuda_leave(struct kvs_cuda_scope *scope)
{
	kvs_cu_context context;
	if (scope->pushed)
		(void)scope->cuda->CtxPopCurrent(&context);
	if (scope->exchanged)
		(void)scope->cuda->ThreadExchangeStreamCaptureMode(&scope->mode);
	scope->pushed = scope->exchanged = false;
}

void kvs_cuda_uuid_text(const struct kvs_cu_uuid *uuid, char text_p[KVS_CUDA_UUID_TEXT])
{
	const unsigned char *b = (const unsigned char *)uuid->bytes;
	(void)snprintf(text_p, KVS_CUDA_UUID_TEXT,
	               "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2],
	               b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}
