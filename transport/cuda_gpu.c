/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_gpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/copy.h"

/* The text of the kernel, NUL-terminated for the driver. */
extern const char kvs_copy_ptx[];
__asm__(".pushsection .rodata\n"
        ".globl kvs_copy_ptx\n"
        ".hidden kvs_copy_ptx\n"
        ".balign 16\n"
        "kvs_copy_ptx:\n"
        ".incbin \"" KVS_COPY_PTX "\"\n"
        ".byte 0\n"
        ".popsection\n");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvs_cuda_gpu *gpus;

kvs_cu_device kvs_cuda_device_by_uuid(const struct kvs_cuda *cuda, const struct kvs_cu_uuid *uuid)
{
	int count = 0;
	if (cuda->DeviceGetCount(&count) != KVS_CU_SUCCESS)
		return -1;
	for (int i = 0; i < count; i++) {
		kvs_cu_device device;
		struct kvs_cu_uuid found;
		if (cuda->DeviceGet(&device, i) == KVS_CU_SUCCESS &&
		    cuda->DeviceGetUuid(&found, device) == KVS_CU_SUCCESS &&
		    memcmp(found.bytes, uuid->bytes, sizeof(found.bytes)) == 0)
			return device;
	}
	return -1;
}

/* Give back what a half-made or unused one holds. */
static void destroy(struct kvs_cuda_gpu *gpu)
{
	struct kvs_cuda_scope scope;
	struct kvs_text ignored;
	if (gpu->module != NULL && kvs_cuda_enter(&scope, gpu->cuda, gpu->context, &ignored)) {
		(void)gpu->cuda->ModuleUnload(gpu->module);
		kvs_cuda_leave(&scope);
	}
	if (gpu->retained)
		(void)gpu->cuda->DevicePrimaryCtxRelease(gpu->device);
	free(gpu);
}

/* The context that an address belongs to. Pool and mapped memory belongs to none: the device's primary one then. */
static bool find_context(struct kvs_cuda_gpu *gpu, uint64_t address, struct kvs_text *text)
{
	const struct kvs_cuda *cuda = gpu->cuda;
	int ordinal = -1, active = 0;
	unsigned flags = 0;
	if (!kvs_cuda_call(cuda, text, PointerGetAttribute, &ordinal, KVS_CU_POINTER_DEVICE_ORDINAL, address) ||
	    !kvs_cuda_call(cuda, text, DeviceGet, &gpu->device, ordinal))
		return false;
	if (cuda->PointerGetAttribute((void *)&gpu->context, KVS_CU_POINTER_CONTEXT, address) == KVS_CU_SUCCESS &&
	    gpu->context != NULL)
		return true;
	gpu->context = NULL;
	if (!kvs_cuda_call(cuda, text, DevicePrimaryCtxGetState, gpu->device, &flags, &active))
		return false;
	if (!active) {
		kvs_text_set(text, "GPU %d has no active context in this process, and none is made for it", ordinal);
		return false;
	}
	gpu->retained = kvs_cuda_call(cuda, text, DevicePrimaryCtxRetain, &gpu->context, gpu->device);
	return gpu->retained;
}

static bool load(struct kvs_cuda_gpu *gpu, struct kvs_text *text)
{
	const struct kvs_cuda *cuda = gpu->cuda;
	struct kvs_cuda_scope scope;
	int pitch = 0;
	if (!kvs_cuda_enter(&scope, cuda, gpu->context, text))
		return false;
	bool ok = kvs_cuda_call(cuda, text, DeviceGetUuid, &gpu->uuid, gpu->device) &&
	          kvs_cuda_call(cuda, text, DeviceGetAttribute, &gpu->multiprocessors, KVS_CU_DEVICE_MULTIPROCESSORS,
	                        gpu->device) &&
	          kvs_cuda_call(cuda, text, DeviceGetAttribute, &pitch, KVS_CU_DEVICE_MAX_PITCH, gpu->device) &&
	          kvs_cuda_call(cuda, text, ModuleLoadData, &gpu->module, kvs_copy_ptx) &&
	          kvs_cuda_call(cuda, text, ModuleGetFunction, &gpu->copy, gpu->module, KVS_GPU_KERNEL);
	gpu->max_pitch = pitch > 0 ? (uint64_t)pitch : 0;
	kvs_cuda_leave(&scope);
	return ok;
}

static struct kvs_cuda_gpu *find(const struct kvs_cuda_gpu *like)
{
	for (struct kvs_cuda_gpu *gpu = gpus; gpu != NULL; gpu = gpu->next) {
		if (gpu->device == like->device && gpu->context == like->context)
			return gpu;
	}
	return NULL;
}

struct kvs_cuda_gpu *kvs_cuda_gpu_of(const struct kvs_cuda *cuda, uint64_t address, struct kvs_text *text)
{
	struct kvs_cuda_gpu *made = calloc(1, sizeof(*made));
	if (made == NULL) {
		kvs_text_set(text, "out of memory");
		return NULL;
	}
	made->cuda = cuda;
	pthread_mutex_lock(&lock);
	struct kvs_cuda_gpu *gpu = find_context(made, address, text) ? find(made) : NULL;
	if (gpu == NULL && made->context != NULL && load(made, text)) {
		gpu = made;
		made = NULL;
		gpu->next = gpus;
		gpus = gpu;
	}
	if (gpu != NULL)
		gpu->refs++;
	pthread_mutex_unlock(&lock);
	if (made != NULL)
		destroy(made);
	return gpu;
}

void kvs_cuda_gpu_ref(struct kvs_cuda_gpu *gpu)
{
	pthread_mutex_lock(&lock);
	gpu->refs++;
	pthread_mutex_unlock(&lock);
}

void kvs_cuda_gpu_put(struct kvs_cuda_gpu *gpu)
{
	if (gpu == NULL)
		return;
	pthread_mutex_lock(&lock);
	bool last = --gpu->refs == 0;
	for (struct kvs_cuda_gpu **at = &gpus; last && *at != NULL; at = &(*at)->next) {
		if (*at == gpu) {
			*at = gpu->next;
			break;
		}
	}
	pthread_mutex_unlock(&lock);
	if (last)
		destroy(gpu);
}

void kvs_cuda_gpu_after_fork_in_child(void)
{
	/* A thread of the parent may have held it. */
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	gpus = NULL;
}
