/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "cuda_engine.h"

#include <inttypes.h>
#include <string.h>

#include "clock.h"
#include "cuda_tables.h"
#include "cuda_wake.h"

#define PIECE_FIRST   (16u << 20)
#define PIECE_MIN     (1u << 20)
#define PIECE_MAX     ((uint64_t)4 << 30)
#define PIECE_SHORT   500000u  /* ns: a full piece that took less may be larger the next time */
#define PIECE_LONG    1500000u /* ns: one that took more is to be smaller */
#define BLOCKS_PER_MP 8u       /* of the kernel's grid: enough to keep the memory busy */
#define BATCH_2D      64u      /* copies put into the stream before it is waited for */

bool kvs_cuda_engine_reserve(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	const struct kvs_cuda *cuda = engine->gpu->cuda;
	struct kvs_cuda_scope scope;
	void *memory = NULL;
	if (engine->bounce != NULL)
		return true;
	if (!kvs_cuda_enter(&scope, cuda, engine->gpu->context, text))
		return false;
	bool ok = kvs_cuda_call(cuda, text, MemHostAlloc, &memory, (size_t)2 * KVS_CUDA_BOUNCE,
	                        KVS_CU_HOSTALLOC_PORTABLE | KVS_CU_HOSTALLOC_DEVICEMAP);
	if (ok && !kvs_cuda_call(cuda, text, MemHostGetDevicePointer, &engine->bounce_device, memory, 0)) {
		(void)cuda->MemFreeHost(memory);
		ok = false;
	}
	engine->bounce = ok ? memory : NULL;
	kvs_cuda_leave(&scope);
	return ok;
}

static bool open_inside(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	const struct kvs_cuda *cuda = engine->gpu->cuda;
	int least = 0, greatest = 0;
	return kvs_cuda_call(cuda, text, CtxGetStreamPriorityRange, &least, &greatest) &&
	       kvs_cuda_call(cuda, text, StreamCreateWithPriority, &engine->stream, KVS_CU_STREAM_NON_BLOCKING,
	                     least) &&
	       kvs_cuda_call(cuda, text, EventCreate, &engine->done,
	                     KVS_CU_EVENT_BLOCKING_SYNC | KVS_CU_EVENT_DISABLE_TIMING) &&
	       kvs_cuda_tables_reserve(engine, KVS_CUDA_TABLE_FIRST, text);
}

bool kvs_cuda_engine_open(struct kvs_cuda_engine *engine, struct kvs_cuda_gpu *gpu, struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	memset(engine, 0, sizeof(*engine));
	if (!kvs_cuda_enter(&scope, gpu->cuda, gpu->context, text))
		return false;
	engine->gpu = gpu;
	kvs_cuda_gpu_ref(gpu);
	engine->piece = PIECE_FIRST;
	bool ok = open_inside(engine, text);
	kvs_cuda_leave(&scope);
	if (!ok)
		kvs_cuda_engine_close(engine);
	return ok;
}

void kvs_cuda_engine_close(struct kvs_cuda_engine *engine)
{
	struct kvs_cuda_scope scope;
	struct kvs_text ignored;
	if (engine->gpu == NULL)
		return;
	const struct kvs_cuda *cuda = engine->gpu->cuda;
	if (kvs_cuda_enter(&scope, cuda, engine->gpu->context, &ignored)) {
		if (engine->stream != NULL) {
			(void)cuda->StreamSynchronize(engine->stream);
			(void)cuda->StreamDestroy(engine->stream);
		}
		if (engine->done != NULL)
			(void)cuda->EventDestroy(engine->done);
		kvs_cuda_tables_free(engine);
		if (engine->bounce != NULL)
			(void)cuda->MemFreeHost(engine->bounce);
		kvs_cuda_leave(&scope);
	}
	kvs_cuda_gpu_put(engine->gpu);
	memset(engine, 0, sizeof(*engine));
}

void kvs_cuda_engine_drain(struct kvs_cuda_engine *engine)
{
	struct kvs_cuda_scope scope;
	struct kvs_text ignored;
	if (engine->gpu == NULL)
		return;
	const struct kvs_cuda *cuda = engine->gpu->cuda;
	/* Without a context too: what may still write is waited for, whatever else fails. */
	bool inside = kvs_cuda_enter(&scope, cuda, engine->gpu->context, &ignored);
	if (cuda->StreamSynchronize(engine->stream) != KVS_CU_SUCCESS)
		(void)cuda->EventSynchronize(engine->done);
	if (inside)
		kvs_cuda_leave(&scope);
	engine->plan = NULL;
	engine->running = engine->pending = false;
}

/* Without a busy core: the event was made for a blocking wait. */
static bool wait(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	const struct kvs_cuda *cuda = engine->gpu->cuda;
	if (!kvs_cuda_call(cuda, text, EventRecord, engine->done, engine->stream) ||
	    !kvs_cuda_call(cuda, text, EventSynchronize, engine->done))
		return false;
	engine->pending = false;
	return true;
}

bool kvs_cuda_engine_begin(struct kvs_cuda_engine *engine, const struct kvs_plan *plan, enum kvs_gpu_mode mode,
                           const uint64_t *sources, enum kvs_cuda_method method, struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	engine->plan = plan;
	engine->mode = mode;
	engine->next_unit = 0;
	engine->copy = engine->pair = 0;
	engine->row = 0;
	engine->position = engine->launched = engine->piece_end = 0;
	engine->running = false;
	engine->half = 0;
	engine->half_size = engine->half_at = 0;
	engine->by_kernel = kvs_cuda_tables_kernel_fits(plan) &&
	                    (mode != KVS_GPU_DIRECT || !kvs_cuda_tables_prefer_2d(engine, method));
	if (!engine->by_kernel && mode != KVS_GPU_DIRECT) {
		kvs_text_set(text, "items of %u bytes and more are not packed on a GPU", KVS_GPU_ITEM_MAX);
		return false;
	}
	if (mode != KVS_GPU_DIRECT && !kvs_cuda_engine_reserve(engine, text))
		return false;
	if (!kvs_cuda_enter(&scope, engine->gpu->cuda, engine->gpu->context, text))
		return false;
	/* An earlier plan that was given up may still read the tables. */
	bool ok = (!engine->pending || wait(engine, text)) && kvs_cuda_tables_fill(engine, sources, text);
	kvs_cuda_leave(&scope);
	return ok;
}

/* One launch. The context current. */
static bool launch(struct kvs_cuda_engine *engine, struct kvs_gpu_span *span, struct kvs_text *text)
{
	uint64_t count = span->unit_end - span->unit_begin;
	uint64_t most = (uint64_t)engine->gpu->multiprocessors * BLOCKS_PER_MP;
	unsigned grid = (unsigned)(count < most || most == 0 ? count : most);
	kvs_cu_pointer pairs = engine->device_table + engine->pairs_offset;
	void *arguments[] = {&engine->device_table, &pairs, span};
	span->copy_count = engine->plan->copy_count;
	span->mode = engine->mode;
	engine->launches++;
	engine->pending = true;
	return kvs_cuda_call(engine->gpu->cuda, text, LaunchKernel, engine->gpu->copy, grid, 1, 1, KVS_GPU_THREADS, 1,
	                     1, 0, engine->stream, arguments, NULL);
}

/* DIRECT, by kernel: the units of one piece. */
static bool launch_kernel(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	uint64_t units = engine->piece / KVS_GPU_UNIT;
	struct kvs_gpu_span span = {.begin = 0, .end = engine->plan->bytes, .unit_begin = engine->next_unit};
	if (units > engine->units - engine->next_unit)
		units = engine->units - engine->next_unit;
	span.unit_end = span.unit_begin + units;
	if (!launch(engine, &span, text))
		return false;
	engine->next_unit = span.unit_end;
	engine->piece_end = kvs_cuda_tables_position(engine, engine->next_unit);
	return true;
}

/* DIRECT, by 2-D copies: as many as make a piece. */
static bool launch_2d(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	struct kvs_cu_memcpy2d copy;
	uint64_t bytes = 0;
	for (uint32_t i = 0; i < BATCH_2D && bytes < engine->piece; i++) {
		uint64_t part = kvs_cuda_tables_next_2d(engine, engine->piece - bytes, &copy);
		if (part == 0)
			break;
		engine->pending = true;
		if (!kvs_cuda_call(engine->gpu->cuda, text, Memcpy2DAsync, &copy, engine->stream))
			return false;
		engine->copies_2d++;
		bytes += part;
	}
	engine->piece_end = engine->position + bytes;
	return true;
}

bool kvs_cuda_engine_launch(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	const struct kvs_cuda *cuda = engine->gpu->cuda;
	struct kvs_cuda_scope scope;
	if (!kvs_cuda_enter(&scope, cuda, engine->gpu->context, text))
		return false;
	engine->begun_ns = kvs_now_ns();
	engine->wakes = kvs_cuda_wakes();
	bool ok = (engine->by_kernel ? launch_kernel(engine, text) : launch_2d(engine, text)) &&
	          kvs_cuda_call(cuda, text, EventRecord, engine->done, engine->stream) &&
	          kvs_cuda_call(cuda, text, LaunchHostFunc, engine->stream, kvs_cuda_wake, NULL);
	kvs_cuda_leave(&scope);
	engine->running = ok;
	return ok;
}

/* A piece is to take about a millisecond. */
static void learn(struct kvs_cuda_engine *engine, uint64_t bytes)
{
	uint64_t took = kvs_now_ns() - engine->begun_ns;
	if (took > PIECE_LONG && engine->piece > PIECE_MIN)
		engine->piece /= 2;
	else if (took < PIECE_SHORT && bytes * 2 >= engine->piece && engine->piece < PIECE_MAX)
		engine->piece *= 2;
}

bool kvs_cuda_engine_poll(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	const struct kvs_cuda *cuda = engine->gpu->cuda;
	struct kvs_cuda_scope scope;
	if (!kvs_cuda_enter(&scope, cuda, engine->gpu->context, text))
		return false;
	engine->wakes = kvs_cuda_wakes();
	kvs_cu_result result = cuda->EventQuery(engine->done);
	bool ok = result == KVS_CU_ERROR_NOT_READY || kvs_cuda_ok(cuda, result, "cuEventQuery", text);
	kvs_cuda_leave(&scope);
	if (result != KVS_CU_SUCCESS)
		return ok;
	engine->running = engine->pending = false;
	learn(engine, engine->piece_end - engine->position);
	engine->position = engine->piece_end;
	return true;
}

/* PACK or UNPACK: launch the bytes [launched, launched + size) of the stream from or to this half. */
static bool launch_half(struct kvs_cuda_engine *engine, uint32_t half, uint64_t size, struct kvs_text *text)
{
	struct kvs_gpu_span span = {.begin = engine->launched,
	                            .end = engine->launched + size,
	                            .linear = engine->bounce_device + (uint64_t)half * KVS_CUDA_BOUNCE};
	kvs_cuda_tables_units(engine, &span);
	if (!launch(engine, &span, text))
		return false;
	engine->launched += size;
	return true;
}

/* The next half is launched before the bytes of this one are handed out, so that both sides are at work. */
static bool next_half(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	uint64_t total = engine->plan->bytes, left = total - engine->launched;
	bool first = engine->launched == 0;
	if (first && !launch_half(engine, 0, left < KVS_CUDA_BOUNCE ? left : KVS_CUDA_BOUNCE, text))
		return false;
	if (!wait(engine, text)) /* the half that is to be read now */
		return false;
	engine->half = first ? 0 : 1 - engine->half;
	engine->half_size = engine->launched - engine->position;
	engine->half_at = 0;
	left = total - engine->launched;
	return left == 0 ||
	       launch_half(engine, 1 - engine->half, left < KVS_CUDA_BOUNCE ? left : KVS_CUDA_BOUNCE, text);
}

bool kvs_cuda_engine_pack(struct kvs_cuda_engine *engine, void *linear_p, size_t size, struct kvs_text *text)
{
	uint8_t *to = linear_p;
	while (size > 0) {
		if (engine->half_at == engine->half_size) {
			struct kvs_cuda_scope scope;
			if (!kvs_cuda_enter(&scope, engine->gpu->cuda, engine->gpu->context, text))
				return false;
			bool ok = next_half(engine, text);
			kvs_cuda_leave(&scope);
			if (!ok)
				return false;
		}
		uint64_t part = engine->half_size - engine->half_at;
		part = part < size ? part : size;
		memcpy(to, engine->bounce + (size_t)engine->half * KVS_CUDA_BOUNCE + engine->half_at, part);
		engine->half_at += part;
		engine->position += part;
		to += part;
		size -= part;
	}
	return true;
}

/*
 * The half is full, or the stream is at its end. It is waited for: the room may be closed as soon as this returns, and
 * nothing may be written after that.
 */
static bool put_half(struct kvs_cuda_engine *engine, struct kvs_text *text)
{
	struct kvs_cuda_scope scope;
	if (!kvs_cuda_enter(&scope, engine->gpu->cuda, engine->gpu->context, text))
		return false;
	bool ok = launch_half(engine, 0, engine->half_size, text) && wait(engine, text);
	kvs_cuda_leave(&scope);
	engine->half_size = 0;
	return ok;
}

bool kvs_cuda_engine_unpack(struct kvs_cuda_engine *engine, const void *linear, size_t size, struct kvs_text *text)
{
	const uint8_t *from = linear;
	while (size > 0) {
		uint64_t part = KVS_CUDA_BOUNCE - engine->half_size;
		part = part < size ? part : size;
		memcpy(engine->bounce + engine->half_size, from, part);
		engine->half_size += part;
		engine->position += part;
		from += part;
		size -= part;
		bool last = engine->position == engine->plan->bytes;
		if ((last || engine->half_size == KVS_CUDA_BOUNCE) && !put_half(engine, text))
			return false;
	}
	return true;
}
