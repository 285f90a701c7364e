/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What tests can ask of the double of libcuda.so.1, beside the driver's own functions. Found with dlsym; a real driver
 * has none of them, and tests that need one are skipped there.
 *
 * Environment, read when the double is loaded:
 *   KVS_DOUBLE_CUDA_DEVICES      how many GPUs the machine has (2); CUDA_VISIBLE_DEVICES chooses among them
 *   KVS_DOUBLE_CUDA_VERSION      what cuDriverGetVersion says (12040)
 *   KVS_DOUBLE_CUDA_MISSING      a function that cuGetProcAddress does not find
 *   KVS_DOUBLE_CUDA_NO_PEER      1: no GPU reaches another one's memory
 *   KVS_DOUBLE_CUDA_NO_READONLY  1: a mapping cannot be made read-only
 *   KVS_DOUBLE_CUDA_HOST_ACCESS  1: the CPU may read and write device memory; otherwise it dies, as on a real machine
 *   KVS_DOUBLE_CUDA_FAULT        CALL=ERROR[@N],...: the Nth call from now (the first) fails with that number, once.
 *                                "kernel" and "memcpy" are what runs later on a stream: the error then sticks to the
 *                                context, as that of a lost device does
 *   KVS_DOUBLE_CUDA_DMA_BUF      0: memory has no descriptor for other drivers (1)
 *   KVS_DOUBLE_CUDA_RDMA_ORDER   what network cards write is seen in order by: 0 nobody, 100 the GPU (100)
 *   KVS_DOUBLE_CUDA_RDMA_FLUSH   1: the host can wait until all of it is seen; 2: it cannot (1)
 *   KVS_DOUBLE_CUDA_DELAY_US     before each piece of work on a stream (0)
 */
#ifndef KVS_DOUBLE_CUDA_CONTROL_H
#define KVS_DOUBLE_CUDA_CONTROL_H

#include <stdint.h>

/* Name, return type, parameters. */
#define KVS_DOUBLE_CONTROL(X) \
	X(fault, int, (const char *list))       /* as the variable; 0: understood */ \
	X(delay, void, (unsigned microseconds)) /* as the variable */ \
	X(calls, uint64_t, (const char *name))  /* how often this function was called; NULL: all together */ \
	X(corrupt, void, (int kernel))   /* the Nth kernel from now leaves a wrong byte where it wrote; 0: none */ \
	X(live, int, (const char *kind)) /* what exists now: see below */ \
	X(writes, uint64_t, (uint64_t address)) /* words written by kernels to the allocation or mapping there */

/*
 * Kinds of live: "allocations", "host", "handles" (references that this process holds), "mappings", "reservations",
 * "ipc" (opened handles, each counted once), "streams", "events", "modules", "retained" (primary contexts), "pushed"
 * (contexts that a thread pushed and has not popped).
 */

#define X(name, type, parameters) type kvs_double_cuda_##name parameters;
KVS_DOUBLE_CONTROL(X)
#undef X

#endif
