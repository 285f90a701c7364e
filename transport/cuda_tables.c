/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_tables.h"

#include <inttypes.h>
#include <string.h>

#define WORD_MAX  4u           /* log2 of the widest word */
#define RUN_2D    (256u << 10) /* bytes of a run from which on the copy engine is as fast as the kernel */
#define CALLS_2D  16u          /* copies that cost no more than a launch and its tables do */
#define WIDTH_MAX ((uint64_t)1 << 30)

_Static_assert(KVS_GPU_UNIT == 16 * KVS_GPU_THREADS * KVS_GPU_UNROLL, "a unit is one step of a thread block");
_Static_assert(sizeof(struct kvs_gpu_pair) == sizeof(struct kvs_item_pair),
               "the plan's pairs are uploaded as they are");

struct kvs_gpu_divisor kvs_cuda_divisor(uint32_t value)
{
	/* m = ceil(2^(31 + l) / value) with l = ceil(log2 value) divides every 31-bit number (Granlund, Montgomery). */
	unsigned log2 = 0;
	while (log2 < 31 && ((uint32_t)1 << log2) < value)
		log2++;
	uint64_t power = (uint64_t)1 << (31 + log2);
	return (struct kvs_gpu_divisor){
	        .value = value, .factor = (unsigned)((power + value - 1) / value), .shift = 31 + log2};
}

void kvs_cuda_tables_free(struct kvs_cuda_engine *engine)
{
	const struct kvs_cuda *cuda = engine->gpu->cuda;
	if (engine->device_table != 0)
		(void)cuda->MemFree(engine->device_table);
	if (engine->host_table != NULL)
		(void)cuda->MemFreeHost(engine->host_table);
	engine->device_table = 0;
	engine->host_table = NULL;
	engine->table_size = 0;
}

bool kvs_cuda_tables_reserve(struct kvs_cuda_engine *engine, size_t size, struct kvs_text *text)
{
	const struct kvs_cuda *cuda = engine->gpu->cuda;
	void *host = NULL;
	kvs_cu_pointer device = 0;
	if (size <= engine->table_size)
		return true;
	size = (size + KVS_CUDA_TABLE_FIRST - 1) / KVS_CUDA_TABLE_FIRST * KVS_CUDA_TABLE_FIRST;
	if (!kvs_cuda_call(cuda, text, MemHostAlloc, &host, size, KVS_CU_HOSTALLOC_PORTABLE))
		return false;
	if (!kvs_cuda_call(cuda, text, MemAlloc, &device, size)) {
		(void)cuda->MemFreeHost(host);
		return false;
	}
	kvs_cuda_tables_free(engine);
	engine->host_table = host;
	engine->device_table = device;
	engine->table_size = size;
	return true;
}

bool kvs_cuda_tables_kernel_fits(const struct kvs_plan *plan)
{
	for (uint32_t i = 0; i < plan->copy_count; i++) {
		const struct kvs_copy *copy = &plan->copies[i];
		if (copy->block_len >= KVS_GPU_ITEM_MAX || copy->block_len * copy->block_count >= KVS_GPU_ITEM_MAX)
			return false;
	}
	return true;
}

/* log2 of the widest word that these numbers are all multiples of. */
static unsigned word_of(uint64_t bits)
{
	unsigned word = 0;
	while (word < WORD_MAX && (bits >> word & 1) == 0)
		word++;
	return word;
}

bool kvs_cuda_tables_fill(struct kvs_cuda_engine *engine, const uint64_t *sources, struct kvs_text *text)
{
	const struct kvs_plan *plan = engine->plan;
	uint64_t units = 0;
	size_t copies = (size_t)plan->copy_count * sizeof(struct kvs_gpu_copy);
	size_t pairs = (size_t)plan->pair_count * sizeof(struct kvs_gpu_pair);
	if (!kvs_cuda_tables_reserve(engine, copies + pairs, text))
		return false;
	struct kvs_gpu_copy *table = (struct kvs_gpu_copy *)(void *)engine->host_table;
	for (uint32_t i = 0; i < plan->copy_count; i++) {
		const struct kvs_copy *copy = &plan->copies[i];
		uint64_t source = copy->src_base + (sources == NULL ? 0 : sources[copy->src_tensor]);
		struct kvs_gpu_copy *entry = &table[i];
		*entry = (struct kvs_gpu_copy){
		        .src_base = source,
		        .dst_base = copy->dst_base,
		        .src_item_stride = copy->src_item_stride,
		        .dst_item_stride = copy->dst_item_stride,
		        .src_block_stride = copy->src_block_stride,
		        .dst_block_stride = copy->dst_block_stride,
		        .stream_start = copy->stream_start,
		        .unit_start = units,
		        .bytes = copy->block_len * copy->block_count * plan->pair_count,
		};
		units += (entry->bytes + KVS_GPU_UNIT - 1) / KVS_GPU_UNIT;
		if (!engine->by_kernel)
			continue;
		entry->item = kvs_cuda_divisor((uint32_t)(copy->block_len * copy->block_count));
		entry->block = kvs_cuda_divisor((uint32_t)copy->block_len);
		uint64_t src_blocks = copy->block_count > 1 ? copy->src_block_stride : 0;
		uint64_t dst_blocks = copy->block_count > 1 ? copy->dst_block_stride : 0;
		entry->src_word = word_of(source | copy->src_item_stride | src_blocks | copy->block_len);
		entry->dst_word = word_of(copy->dst_base | copy->dst_item_stride | dst_blocks | copy->block_len);
	}
	engine->units = units;
	engine->pairs_offset = copies;
	if (!engine->by_kernel)
		return true; /* 2-D copies read the table on the host */
	memcpy(engine->host_table + copies, plan->pairs, pairs);
	return kvs_cuda_call(engine->gpu->cuda, text, MemcpyHtoDAsync, engine->device_table, engine->host_table,
	                     copies + pairs, engine->stream);
}

static const struct kvs_gpu_copy *table_of(const struct kvs_cuda_engine *engine)
{
	return (const struct kvs_gpu_copy *)(const void *)engine->host_table;
}

/* The last copy whose first unit is at or before this one. */
static const struct kvs_gpu_copy *copy_of_unit(const struct kvs_cuda_engine *engine, uint64_t unit)
{
	uint32_t low = 0, high = engine->plan->copy_count;
	while (high - low > 1) {
		uint32_t middle = low + (high - low) / 2;
		if (table_of(engine)[middle].unit_start <= unit)
			low = middle;
		else
			high = middle;
	}
	return &table_of(engine)[low];
}

uint64_t kvs_cuda_tables_position(const struct kvs_cuda_engine *engine, uint64_t unit)
{
	if (unit >= engine->units)
		return engine->plan->bytes;
	const struct kvs_gpu_copy *copy = copy_of_unit(engine, unit);
	return copy->stream_start + (unit - copy->unit_start) * KVS_GPU_UNIT;
}

/* The unit that holds this byte. */
static uint64_t unit_of(const struct kvs_cuda_engine *engine, uint64_t position)
{
	uint32_t low = 0, high = engine->plan->copy_count;
	while (high - low > 1) {
		uint32_t middle = low + (high - low) / 2;
		if (table_of(engine)[middle].stream_start <= position)
			low = middle;
		else
			high = middle;
	}
	const struct kvs_gpu_copy *copy = &table_of(engine)[low];
	return copy->unit_start + (position - copy->stream_start) / KVS_GPU_UNIT;
}

void kvs_cuda_tables_units(const struct kvs_cuda_engine *engine, struct kvs_gpu_span *span)
{
	span->unit_begin = unit_of(engine, span->begin);
	span->unit_end = unit_of(engine, span->end - 1) + 1;
}

/*
 * Items that follow each other on both sides, from this pair on, are one stretch: of rows as long as a block, one below
 * the other at the block stride; or, where an item is one block, at the item stride.
 */
struct stretch {
	uint32_t items;
	uint64_t width;
	uint64_t rows;
	uint64_t src_pitch;
	uint64_t dst_pitch;
};

static struct stretch stretch_at(const struct kvs_plan *plan, const struct kvs_copy *copy, uint32_t pair)
{
	struct stretch s = {.items = 1,
	                    .width = copy->block_len,
	                    .rows = copy->block_count,
	                    .src_pitch = copy->src_block_stride,
	                    .dst_pitch = copy->dst_block_stride};
	bool even = copy->block_count == 1 || (copy->src_block_stride * copy->block_count == copy->src_item_stride &&
	                                       copy->dst_block_stride * copy->block_count == copy->dst_item_stride);
	if (copy->block_count == 1) {
		s.src_pitch = copy->src_item_stride;
		s.dst_pitch = copy->dst_item_stride;
	}
	while (even && pair + s.items < plan->pair_count &&
	       plan->pairs[pair + s.items].src == plan->pairs[pair].src + s.items &&
	       plan->pairs[pair + s.items].dst == plan->pairs[pair].dst + s.items)
		s.items++;
	s.rows *= s.items;
	/* Rows without a gap on either side are one row. */
	if (s.src_pitch == s.width && s.dst_pitch == s.width && s.rows <= WIDTH_MAX / s.width) {
		s.width *= s.rows;
		s.rows = 1;
		s.src_pitch = s.dst_pitch = s.width;
	}
	return s;
}

bool kvs_cuda_tables_prefer_2d(const struct kvs_cuda_engine *engine, enum kvs_cuda_method method)
{
	const struct kvs_plan *plan = engine->plan;
	uint64_t calls = 0;
	if (method != KVS_CUDA_METHOD_AUTO)
		return method == KVS_CUDA_METHOD_2D;
	if (plan->copy_count > CALLS_2D || plan->runs == 0 || plan->bytes / plan->runs < RUN_2D)
		return false;
	for (uint32_t c = 0; c < plan->copy_count; c++) {
		for (uint32_t pair = 0; pair < plan->pair_count; calls++) {
			struct stretch s = stretch_at(plan, &plan->copies[c], pair);
			if (s.src_pitch > engine->gpu->max_pitch || s.dst_pitch > engine->gpu->max_pitch ||
			    calls >= CALLS_2D)
				return false;
			pair += s.items;
		}
	}
	return true;
}

uint64_t kvs_cuda_tables_next_2d(struct kvs_cuda_engine *engine, uint64_t limit, struct kvs_cu_memcpy2d *copy_p)
{
	const struct kvs_plan *plan = engine->plan;
	if (plan->pair_count == 0 || engine->copy >= plan->copy_count)
		return 0;
	const struct kvs_copy *copy = &plan->copies[engine->copy];
	const struct kvs_gpu_copy *bases = &table_of(engine)[engine->copy];
	struct stretch s = stretch_at(plan, copy, engine->pair);
	uint64_t rows = limit / s.width, left = s.rows - engine->row;
	rows = rows == 0 ? 1 : rows;
	rows = rows < left ? rows : left;
	memset(copy_p, 0, sizeof(*copy_p));
	copy_p->src_type = copy_p->dst_type = KVS_CU_MEMORYTYPE_UNIFIED;
	copy_p->src_device =
	        bases->src_base + plan->pairs[engine->pair].src * copy->src_item_stride + engine->row * s.src_pitch;
	copy_p->dst_device =
	        bases->dst_base + plan->pairs[engine->pair].dst * copy->dst_item_stride + engine->row * s.dst_pitch;
	copy_p->src_pitch = s.src_pitch;
	copy_p->dst_pitch = s.dst_pitch;
	copy_p->width = s.width;
	copy_p->height = rows;
	engine->row += rows;
	if (engine->row == s.rows) {
		engine->row = 0;
		engine->pair += s.items;
		if (engine->pair == plan->pair_count) {
			engine->pair = 0;
			engine->copy++;
		}
	}
	return rows * s.width;
}
