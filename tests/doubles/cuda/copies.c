/* SPDX-License-Identifier: Apache-2.0 */
/* Copies that the driver makes itself, at once and on streams. */
#include <stdlib.h>
#include <string.h>

#include "double.h"

struct copy2d {
	struct kvs_cu_memcpy2d copy;
	uint8_t *staged; /* what a host source held when the copy was asked for; NULL: the source is device memory */
};

static unsigned run_2d(void *work, int device)
{
	struct copy2d *job = work;
	const struct kvs_cu_memcpy2d *c = &job->copy;
	unsigned error = fault_of("memcpy");
	pthread_rwlock_rdlock(&ranges_lock);
	for (size_t row = 0; row < c->height && error == OK; row++) {
		const uint8_t *from = job->staged != NULL
		                              ? job->staged + row * c->width
		                              : reach(c->src_device + row * c->src_pitch, c->width, device, false);
		uint8_t *to = reach(c->dst_device + row * c->dst_pitch, c->width, device, true);
		if (from == NULL || to == NULL)
			error = ILLEGAL_ADDRESS;
		else
			memmove(to, from, c->width);
	}
	pthread_rwlock_unlock(&ranges_lock);
	free(job->staged);
	return error;
}

unsigned cuMemcpy2DAsync_v2(const struct kvs_cu_memcpy2d *copy, struct CUstream_st *stream);
EXPORT unsigned cuMemcpy2DAsync_v2(const struct kvs_cu_memcpy2d *copy, struct CUstream_st *stream)
{
	struct copy2d job = {.copy = *copy};
	ENTER(Memcpy2DAsync);
	bool unified = copy->src_type == KVS_CU_MEMORYTYPE_UNIFIED && copy->dst_type == KVS_CU_MEMORYTYPE_UNIFIED;
	bool placed = copy->src_x == 0 && copy->src_y == 0 && copy->dst_x == 0 && copy->dst_y == 0;
	if (!unified || !placed || copy->src_pitch < copy->width || copy->dst_pitch < copy->width ||
	    copy->src_pitch > 0x7fffffff || copy->dst_pitch > 0x7fffffff)
		return INVALID_VALUE;
	return stream_put(stream, run_2d, &job, sizeof(job));
}

static unsigned linear(uint64_t to, uint64_t from, const void *host, size_t size, struct CUstream_st *stream)
{
	struct copy2d job = {
	        .copy = {.src_device = from, .dst_device = to, .width = size, .height = 1, .src_pitch = size}};
	if (host != NULL) {
		job.staged = malloc(size);
		if (job.staged == NULL)
			return OUT_OF_MEMORY;
		memcpy(job.staged, host, size);
	}
	return stream_put(stream, run_2d, &job, sizeof(job));
}

unsigned cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, struct CUstream_st *stream);
EXPORT unsigned cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, struct CUstream_st *stream)
{
	ENTER(MemcpyHtoDAsync);
	return linear(to, 0, from, size, stream);
}

unsigned cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, struct CUstream_st *stream);
EXPORT unsigned cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, struct CUstream_st *stream)
{
	ENTER(MemcpyDtoDAsync);
	return linear(to, from, NULL, size, stream);
}

/* Across ranges that follow each other, as mapped memory may. */
static unsigned at_once(uint64_t device_address, uint8_t *to_host, const uint8_t *from_host, int value, size_t size)
{
	unsigned error = current() == NULL ? INVALID_CONTEXT : OK;
	pthread_rwlock_rdlock(&ranges_lock);
	while (size > 0 && error == OK) {
		const struct range *range = range_find(device_address);
		size_t part = range == NULL ? 0 : range->size - (device_address - range->base);
		part = part < size ? part : size;
		uint8_t *memory = part == 0 ? NULL : range->memory + (device_address - range->base);
		if (memory == NULL) {
			error = INVALID_VALUE;
			break;
		}
		if (to_host != NULL)
			memcpy(to_host, memory, part);
		else if (from_host != NULL)
			memcpy(memory, from_host, part);
		else
			memset(memory, value, part);
		to_host = to_host == NULL ? NULL : to_host + part;
		from_host = from_host == NULL ? NULL : from_host + part;
		device_address += part;
		size -= part;
	}
	pthread_rwlock_unlock(&ranges_lock);
	return error;
}

unsigned cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size);
EXPORT unsigned cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size)
{
	ENTER(MemcpyHtoD);
	return at_once(to, NULL, from, 0, size);
}

unsigned cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size);
EXPORT unsigned cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
	ENTER(MemcpyDtoH);
	return at_once(from, to, NULL, 0, size);
}

unsigned cuMemsetD8_v2(uint64_t to, unsigned char value, size_t size);
EXPORT unsigned cuMemsetD8_v2(uint64_t to, unsigned char value, size_t size)
{
	ENTER(MemsetD8);
	return at_once(to, NULL, NULL, value, size);
}
