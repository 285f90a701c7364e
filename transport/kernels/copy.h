/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the copy kernel is given: read by C and by CUDA C alike. A copy's bytes in canonical order (policy/plan.h) are
 * cut into units; a thread block moves one unit at a time.
 */
#ifndef KVS_TRANSPORT_KERNELS_COPY_H
#define KVS_TRANSPORT_KERNELS_COPY_H

#define KVS_GPU_KERNEL   "kvs_copy_kernel"
#define KVS_GPU_THREADS  256
#define KVS_GPU_UNROLL   4          /* words in flight per thread */
#define KVS_GPU_UNIT     16384u     /* bytes: one word of 16 per thread and step */
#define KVS_GPU_ITEM_MAX (1u << 30) /* bytes of an item that moves by the kernel */

/* floor(x / d) is (x * factor) >> shift for every x below 2^31. */
struct kvs_gpu_divisor {
	unsigned value;
	unsigned factor;
	unsigned shift;
};

struct kvs_gpu_copy {
	unsigned long long src_base; /* an address on this device */
	unsigned long long dst_base;
	unsigned long long src_item_stride;
	unsigned long long dst_item_stride;
	unsigned long long src_block_stride;
	unsigned long long dst_block_stride;
	unsigned long long stream_start; /* position of its first byte in the canonical order */
	unsigned long long unit_start;   /* number of its first unit */
	unsigned long long bytes;
	struct kvs_gpu_divisor item;  /* bytes of one item that move */
	struct kvs_gpu_divisor block; /* bytes of one run */
	unsigned src_word; /* log2 of the widest word, at most 4, that all its addresses on a side are aligned to */
	unsigned dst_word;
};

struct kvs_gpu_pair {
	unsigned src;
	unsigned dst;
};

enum kvs_gpu_mode {
	KVS_GPU_DIRECT, /* strided to strided */
	KVS_GPU_PACK,   /* strided source to linear memory */
	KVS_GPU_UNPACK, /* linear memory to strided destination */
};

/* One launch: the bytes [begin, end) of the canonical order, which lie in the units [unit_begin, unit_end). */
struct kvs_gpu_span {
	unsigned long long begin;
	unsigned long long end;
	unsigned long long unit_begin;
	unsigned long long unit_end;
	unsigned long long linear; /* address of the byte at begin; not for DIRECT */
	unsigned copy_count;
	unsigned mode;
};

#endif
