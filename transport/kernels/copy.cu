/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy kernel: moves the bytes of a copy plan between strided places, or between them and linear memory. Built to
 * copy.ptx by transport/kernels/build; the test double of the driver compiles this file as C, so it keeps to what both
 * languages have.
 *
 * A block takes a unit, finds its copy and its first item, and every thread moves words of the widest size that both
 * sides allow. Only a unit that the span cuts at an odd byte falls back to a narrower word.
 */
#include "copy.h"

typedef unsigned long long address_t;

#ifdef __cplusplus
#define KERNEL                      extern "C" __global__
#define READ(word, address)         (*(const word *)(address))
#define WRITE(word, address, value) (*(word *)(address) = (value))
#else
#define KERNEL static /* READ and WRITE are the double's */
#endif

struct unit {
	const struct kvs_gpu_copy *copy;
	const struct kvs_gpu_pair *pairs; /* from its first item on */
	unsigned rest;                    /* where it begins in that item */
	unsigned size;
	address_t linear;
	unsigned mode;
};

static __device__ __forceinline__ unsigned quotient(unsigned x, struct kvs_gpu_divisor divisor)
{
	return (unsigned)(((unsigned long long)x * divisor.factor) >> divisor.shift);
}

/* Source and destination of the byte at this offset of the unit. */
static __device__ __forceinline__ void places(const struct unit *unit, unsigned offset, address_t *from_p,
                                              address_t *to_p)
{
	const struct kvs_gpu_copy *copy = unit->copy;
	unsigned x = unit->rest + offset;
	unsigned item = quotient(x, copy->item);
	unsigned in_item = x - item * copy->item.value;
	unsigned block = quotient(in_item, copy->block);
	unsigned in_block = in_item - block * copy->block.value;
	struct kvs_gpu_pair pair = unit->pairs[item];
	*from_p = unit->mode == KVS_GPU_UNPACK ? unit->linear + offset
	                                       : copy->src_base + pair.src * copy->src_item_stride +
	                                                 block * copy->src_block_stride + in_block;
	*to_p = unit->mode == KVS_GPU_PACK ? unit->linear + offset
	                                   : copy->dst_base + pair.dst * copy->dst_item_stride +
	                                             block * copy->dst_block_stride + in_block;
}

/* Fewer words in flight where they are narrow: those are rare, and the driver compiles all of this at start. */
#define MOVE(name, word, unroll) \
	static __device__ __forceinline__ void name(const struct unit *unit) \
	{ \
		for (unsigned first = threadIdx.x; first * sizeof(word) < unit->size; \
		     first += KVS_GPU_THREADS * (unroll)) { \
			word value[(unroll)]; \
			address_t to[(unroll)]; \
			_Pragma("unroll") for (unsigned i = 0; i < (unroll); i++) \
			{ \
				unsigned offset = (first + i * KVS_GPU_THREADS) * (unsigned)sizeof(word); \
				address_t from; \
				if (offset >= unit->size) \
					continue; \
				places(unit, offset, &from, &to[i]); \
				value[i] = READ(word, from); \
			} \
			_Pragma("unroll") for (unsigned i = 0; i < (unroll); i++) \
			{ \
				if ((first + i * KVS_GPU_THREADS) * sizeof(word) < unit->size) \
					WRITE(word, to[i], value[i]); \
			} \
		} \
	}

MOVE(move16, uint4, KVS_GPU_UNROLL)
MOVE(move8, uint2, 2)
MOVE(move4, unsigned, 1)
MOVE(move2, unsigned short, 1)
MOVE(move1, unsigned char, 1)

/* The last copy that begins at or before this unit. */
static __device__ __forceinline__ const struct kvs_gpu_copy *find(const struct kvs_gpu_copy *copies, unsigned count,
                                                                  unsigned long long number)
{
	unsigned low = 0;
	while (count - low > 1) {
		unsigned middle = low + (count - low) / 2;
		if (copies[middle].unit_start <= number)
			low = middle;
		else
			count = middle;
	}
	return copies + low;
}

/* False: no byte of it is in the span. */
static __device__ __forceinline__ int cut(struct unit *unit, const struct kvs_gpu_pair *pairs,
                                          const struct kvs_gpu_span *span, unsigned long long number)
{
	const struct kvs_gpu_copy *copy = unit->copy;
	unsigned long long begin = (number - copy->unit_start) * KVS_GPU_UNIT;
	unsigned long long end = begin + KVS_GPU_UNIT;
	if (end > copy->bytes)
		end = copy->bytes;
	if (copy->stream_start + begin < span->begin)
		begin = span->begin - copy->stream_start;
	if (copy->stream_start + end > span->end)
		end = span->end > copy->stream_start ? span->end - copy->stream_start : 0;
	if (begin >= end)
		return 0;
	unsigned long long item = begin / copy->item.value;
	unit->pairs = pairs + item;
	unit->rest = (unsigned)(begin - item * copy->item.value);
	unit->size = (unsigned)(end - begin);
	unit->linear = span->linear + (copy->stream_start + begin - span->begin);
	unit->mode = span->mode;
	return 1;
}

static __device__ __forceinline__ unsigned word_of(const struct unit *unit)
{
	unsigned word = unit->mode == KVS_GPU_UNPACK ? unit->copy->dst_word : unit->copy->src_word;
	if (unit->mode == KVS_GPU_DIRECT && unit->copy->dst_word < word)
		word = unit->copy->dst_word;
	unsigned odd = unit->rest | unit->size;
	if (unit->mode != KVS_GPU_DIRECT)
		odd |= (unsigned)unit->linear;
	while (word > 0 && (odd & ((1u << word) - 1)) != 0)
		word--;
	return word;
}

KERNEL void __launch_bounds__(KVS_GPU_THREADS)
        kvs_copy_kernel(const struct kvs_gpu_copy *copies, const struct kvs_gpu_pair *pairs, const struct kvs_gpu_span span)
{
	for (unsigned long long number = span.unit_begin + blockIdx.x; number < span.unit_end; number += gridDim.x) {
		struct unit unit;
		unit.copy = find(copies, span.copy_count, number);
		if (!cut(&unit, pairs, &span, number))
			continue;
		switch (word_of(&unit)) {
		case 4:
			move16(&unit);
			break;
		case 3:
			move8(&unit);
			break;
		case 2:
			move4(&unit);
			break;
		case 1:
			move2(&unit);
			break;
		default:
			move1(&unit);
			break;
		}
	}
}
