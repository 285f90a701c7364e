/* SPDX-License-Identifier: Apache-2.0 */
/* The driver as the tests use it: their own copy of the server's role. */
#ifndef KVS_TEST_CUDA_DEVICE_H
#define KVS_TEST_CUDA_DEVICE_H

#include <stdint.h>

#include "../../transport/cuda_engine.h"
#include "../../transport/cuda_memory.h"
#include "../doubles/cuda/control.h"
#include "check.h"

struct driver {
	unsigned (*Init)(unsigned flags);
	unsigned (*CtxSetCurrent)(kvs_cu_context context);
	unsigned (*CtxGetCurrent)(kvs_cu_context *context_p);
	unsigned (*MemcpyHtoD)(uint64_t to, const void *from, size_t size);
	unsigned (*MemcpyDtoH)(void *to, uint64_t from, size_t size);
	unsigned (*MemsetD8)(uint64_t to, unsigned char value, size_t size);
	unsigned (*MemAllocAsync)(uint64_t *pointer_p, size_t size, void *stream);
	unsigned (*MemAllocManaged)(uint64_t *pointer_p, size_t size, unsigned flags);
	unsigned (*MemCreate)(uint64_t *handle_p, size_t size, const struct kvs_cu_allocation_prop *prop,
	                      uint64_t flags);
	unsigned (*MemGetAllocationGranularity)(size_t *size_p, const struct kvs_cu_allocation_prop *prop,
	                                        unsigned option);
	unsigned (*StreamBeginCapture)(kvs_cu_stream stream, unsigned mode);
	unsigned (*StreamEndCapture)(kvs_cu_stream stream, void **graph_p);
	unsigned (*GraphDestroy)(void *graph);
	unsigned (*MemcpyDtoDAsync)(uint64_t to, uint64_t from, size_t size, kvs_cu_stream stream);
	const struct kvs_cuda *cuda; /* the library's own table */
	                             /* The double's; NULL on a real driver. */
#define X(name, type, parameters) type(*name) parameters;
	KVS_DOUBLE_CONTROL(X)
#undef X
};

/* Load the driver, make the context of this device current. Skips the case where there is none. */
const struct driver *driver_start(int device);
/* Skips the case on a real driver. */
void need_double(const struct driver *driver);

/* Device memory of one kind, as a server may have allocated it. */
struct block {
	enum kvs_cuda_kind kind;
	int device;
	uint64_t address;
	size_t size;     /* asked for */
	size_t reserved; /* mapped kinds */
	uint32_t parts;  /* mapped kinds: physical allocations that it is made of */
};

struct block block_new(const struct driver *driver, int device, enum kvs_cuda_kind kind, size_t size, uint32_t parts);
void block_free(const struct driver *driver, struct block *block);
/* Give the pages back and keep the addresses; put new pages there. Mapped kinds only. */
void block_pause(const struct driver *driver, struct block *block);
void block_resume(const struct driver *driver, struct block *block);

/* One piece of a direct plan, from its launch to its end. False with text. */
bool engine_step(struct kvs_cuda_engine *engine, struct kvs_text *text);
/*
 * Run a plan with the kernel, in one piece; returns how often the driver was called, with one look at the end of the
 * piece. Only with the double.
 */
uint64_t engine_calls(const struct driver *driver, struct kvs_cuda_engine *engine, const struct kvs_plan *plan);
/* Until the piece that was launched has ended. */
bool engine_wait(struct kvs_cuda_engine *engine, struct kvs_text *text);

void device_write(const struct driver *driver, uint64_t to, const void *from, size_t size);
void device_read(const struct driver *driver, void *to, uint64_t from, size_t size);

#endif
