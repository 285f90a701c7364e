/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs copy plans on a GPU: a stream of our own, of low priority, that the server's work goes before, and the tables of
 * the plan at hand. One thread at a time.
 *
 * A plan runs in pieces, each of about a millisecond, so that a room can be closed between them. Usually one piece is
 * all of it. A piece is one launch of the copy kernel, or, where a plan is a few long runs, 2-D copies by the copy
 * engine (docs/cuda.md has the rule). DIRECT pieces run by themselves while the thread goes on (cuda_wake.h says when
 * one has ended); PACK and UNPACK are waited for.
 */
#ifndef KVS_TRANSPORT_CUDA_ENGINE_H
#define KVS_TRANSPORT_CUDA_ENGINE_H

#include "../policy/plan.h"
#include "cuda_gpu.h"
#include "kernels/copy.h"

#define KVS_CUDA_BOUNCE (4u << 20) /* bytes of page-locked memory that packed data passes through, twice per engine */

/* KVSPLICE_CUDA_COPY, in the order of its words. */
enum kvs_cuda_method {
	KVS_CUDA_METHOD_AUTO, /* by the rule */
	KVS_CUDA_METHOD_KERNEL,
	KVS_CUDA_METHOD_2D,
};

struct kvs_cuda_engine {
	struct kvs_cuda_gpu *gpu; /* a reference; NULL: not open */
	kvs_cu_stream stream;
	kvs_cu_event done;
	uint64_t piece; /* bytes that take about a millisecond, learnt */

	/* The plan at hand. */
	const struct kvs_plan *plan;
	enum kvs_gpu_mode mode;
	bool by_kernel;
	uint64_t units;
	uint64_t next_unit;  /* DIRECT, by kernel */
	uint32_t copy, pair; /* DIRECT, by 2-D copies */
	uint64_t row;        /* of the stretch of items that begins there */
	uint64_t position;   /* bytes done, or handed out, or taken in */
	bool running;        /* DIRECT: a piece is in the stream */
	uint64_t piece_end;  /* position when it has ended */
	uint64_t begun_ns;   /* when it was put there */
	uint64_t wakes;      /* kvs_cuda_wakes before it was, or was last looked at */

	/* Tables: written in page-locked host memory, uploaded to the device. Only grow. */
	uint8_t *host_table;
	kvs_cu_pointer device_table;
	size_t table_size;
	size_t pairs_offset;

	/* Page-locked memory that PACK and UNPACK pass through: two halves in turn. */
	uint8_t *bounce;
	kvs_cu_pointer bounce_device;
	uint32_t half;      /* PACK: the one being read. UNPACK uses the first alone */
	uint64_t half_size; /* PACK: valid bytes in it. UNPACK: bytes filled */
	uint64_t half_at;   /* PACK: bytes of it handed out */
	uint64_t launched;  /* end of what was launched */
	bool pending;       /* something was launched and not waited for */

	uint64_t launches; /* for tests and the log */
	uint64_t copies_2d;
};

/* A reference to the gpu is taken. False with text: nothing is left. */
bool kvs_cuda_engine_open(struct kvs_cuda_engine *engine, struct kvs_cuda_gpu *gpu, struct kvs_text *text);

/* Make the memory that PACK and UNPACK pass through, if it is not there yet. False with text. */
bool kvs_cuda_engine_reserve(struct kvs_cuda_engine *engine, struct kvs_text *text);

/* Waits for what runs. Idempotent; a zeroed engine is accepted. */
void kvs_cuda_engine_close(struct kvs_cuda_engine *engine);

/*
 * Begin a plan, which must outlive the run. sources: for DIRECT, the address on this GPU of each tensor of the source
 * component (the plan's own are offsets in them); NULL: the plan's source addresses are ours. False with text.
 */
bool kvs_cuda_engine_begin(struct kvs_cuda_engine *engine, const struct kvs_plan *plan, enum kvs_gpu_mode mode,
                           const uint64_t *sources, enum kvs_cuda_method method, struct kvs_text *text);

/*
 * DIRECT: put the next piece into the stream and come back at once. Not while one is running, nor at plan->bytes. False
 * with text; part of it may run nevertheless, until kvs_cuda_engine_drain.
 */
bool kvs_cuda_engine_launch(struct kvs_cuda_engine *engine, struct kvs_text *text);

/*
 * DIRECT: has the piece ended? Then engine->running is false and engine->position has grown; at plan->bytes all is in
 * place. False with text.
 */
bool kvs_cuda_engine_poll(struct kvs_cuda_engine *engine, struct kvs_text *text);

/* PACK: the next size bytes of the stream (no more than there are). False with text. */
bool kvs_cuda_engine_pack(struct kvs_cuda_engine *engine, void *linear_p, size_t size, struct kvs_text *text);

/*
 * UNPACK: take the next size bytes of the stream. They are in place when this returns with engine->position at
 * plan->bytes, and not before. False with text.
 */
bool kvs_cuda_engine_unpack(struct kvs_cuda_engine *engine, const void *linear, size_t size, struct kvs_text *text);

/* Wait until nothing of this engine runs, whatever became of it: the pages may be given away then. */
void kvs_cuda_engine_drain(struct kvs_cuda_engine *engine);

#endif
