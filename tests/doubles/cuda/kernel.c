/* SPDX-License-Identifier: Apache-2.0 */
/* Modules, and the copy kernel: its own source, compiled as C, every access checked against what the GPU may reach. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

/* gcc cannot see that a word is written only where it was read. */
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

typedef struct {
	unsigned x, y;
} uint2;
typedef struct {
	unsigned x, y, z, w;
} uint4;
struct index {
	unsigned x;
};

static __thread struct index threadIdx, blockIdx, gridDim;
static __thread int kernel_device;
static __thread bool illegal;
static __thread uint4 nowhere;
static __thread uint8_t *last_written;
static atomic_int to_corrupt;

/* A misaligned or unreachable address ends the kernel with an error, as on a GPU. */
static void *checked(uint64_t address, size_t size, bool write)
{
	uint8_t *memory = address % size != 0 ? NULL : reach(address, size, kernel_device, write);
	if (memory == NULL) {
		illegal = true;
		return &nowhere;
	}
	if (write)
		last_written = memory;
	return memory;
}

#define READ(word, address)         (*(const word *)checked((address), sizeof(word), false))
#define WRITE(word, address, value) (*(word *)checked((address), sizeof(word), true) = (value))

#define __device__
#define __forceinline__      inline
#define __launch_bounds__(n) /* none */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#include "../../../transport/kernels/copy.cu"
#pragma GCC diagnostic pop

struct CUfunc_st {
	int unused;
};

struct CUmod_st {
	struct CUfunc_st copy;
};

struct launch {
	uint64_t copies;
	uint64_t pairs;
	struct kvs_gpu_span span;
	unsigned grid;
};

static _Atomic int modules;

int live_modules(void)
{
	return modules;
}

EXPORT void kvs_double_cuda_corrupt(int kernel)
{
	to_corrupt = kernel;
}

static unsigned run_kernel(void *work, int device)
{
	const struct launch *launch = work;
	unsigned error = fault_of("kernel");
	uint64_t pairs_size = 0;
	if (error != OK)
		return error;
	kernel_device = device;
	illegal = false;
	last_written = NULL;
	gridDim.x = launch->grid;
	pthread_rwlock_rdlock(&ranges_lock);
	const struct kvs_gpu_copy *copies =
	        (const void *)reach(launch->copies, launch->span.copy_count * sizeof(*copies), device, false);
	if (copies != NULL && launch->span.copy_count > 0)
		pairs_size = copies[0].bytes / copies[0].item.value * sizeof(struct kvs_gpu_pair);
	const struct kvs_gpu_pair *pairs = (const void *)reach(launch->pairs, pairs_size, device, false);
	illegal = copies == NULL || pairs == NULL;
	for (blockIdx.x = 0; blockIdx.x < launch->grid && !illegal; blockIdx.x++) {
		for (threadIdx.x = 0; threadIdx.x < KVS_GPU_THREADS && !illegal; threadIdx.x++)
			kvs_copy_kernel(copies, pairs, launch->span);
	}
	if (to_corrupt > 0 && --to_corrupt == 0 && last_written != NULL)
		*last_written ^= 0x10;
	pthread_rwlock_unlock(&ranges_lock);
	return illegal ? ILLEGAL_ADDRESS : OK;
}

unsigned cuModuleLoadData(struct CUmod_st **module_p, const void *image);
EXPORT unsigned cuModuleLoadData(struct CUmod_st **module_p, const void *image)
{
	ENTER(ModuleLoadData);
	if (current() == NULL)
		return INVALID_CONTEXT;
	if (strstr(image, "\n.version ") == NULL || strstr(image, ".entry " KVS_GPU_KERNEL "(") == NULL)
		return INVALID_IMAGE;
	*module_p = calloc(1, sizeof(**module_p));
	modules++;
	return *module_p == NULL ? OUT_OF_MEMORY : OK;
}

unsigned cuModuleGetFunction(struct CUfunc_st **function_p, struct CUmod_st *module, const char *name);
EXPORT unsigned cuModuleGetFunction(struct CUfunc_st **function_p, struct CUmod_st *module, const char *name)
{
	ENTER(ModuleGetFunction);
	*function_p = &module->copy;
	return strcmp(name, KVS_GPU_KERNEL) == 0 ? OK : NOT_FOUND;
}

unsigned cuModuleUnload(struct CUmod_st *module);
EXPORT unsigned cuModuleUnload(struct CUmod_st *module)
{
	ENTER(ModuleUnload);
	free(module);
	modules--;
	return OK;
}

unsigned cuLaunchKernel(struct CUfunc_st *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, struct CUstream_st *stream,
                        void **arguments, void **extra);
EXPORT unsigned cuLaunchKernel(struct CUfunc_st *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                               struct CUstream_st *stream, void **arguments, void **extra)
{
	struct launch launch = {.grid = grid_x};
	ENTER(LaunchKernel);
	if (function == NULL || grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x != KVS_GPU_THREADS ||
	    block_y != 1 || block_z != 1 || shared != 0 || extra != NULL)
		return INVALID_VALUE;
	memcpy(&launch.copies, arguments[0], sizeof(launch.copies));
	memcpy(&launch.pairs, arguments[1], sizeof(launch.pairs));
	memcpy(&launch.span, arguments[2], sizeof(launch.span));
	return stream_put(stream, run_kernel, &launch, sizeof(launch));
}
