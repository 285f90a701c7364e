/* SPDX-License-Identifier: Apache-2.0 */
/* From a copy plan to what the kernel, or the copy engine, is given. Parts of cuda_engine.h; one thread at a time. */
#ifndef KVS_TRANSPORT_CUDA_TABLES_H
#define KVS_TRANSPORT_CUDA_TABLES_H

#include "cuda_engine.h"

#define KVS_CUDA_TABLE_FIRST (1u << 20) /* bytes of the tables made at the handshake: about 60,000 pairs */

/* Host and device tables of at least so many bytes. The context current. False with text; the old ones stay. */
bool kvs_cuda_tables_reserve(struct kvs_cuda_engine *engine, size_t size, struct kvs_text *text);

/* The context current. */
void kvs_cuda_tables_free(struct kvs_cuda_engine *engine);

/* Write and upload the tables of engine->plan. The context current. False with text. */
bool kvs_cuda_tables_fill(struct kvs_cuda_engine *engine, const uint64_t *sources, struct kvs_text *text);

/* Can the kernel move it: are all items below KVS_GPU_ITEM_MAX? */
bool kvs_cuda_tables_kernel_fits(const struct kvs_plan *plan);

/* Few long runs, for which the copy engine is the better tool? */
bool kvs_cuda_tables_prefer_2d(const struct kvs_cuda_engine *engine, enum kvs_cuda_method method);

/* Bytes of the stream before this unit. */
uint64_t kvs_cuda_tables_position(const struct kvs_cuda_engine *engine, uint64_t unit);

/* The units that hold the span's bytes. */
void kvs_cuda_tables_units(const struct kvs_cuda_engine *engine, struct kvs_gpu_span *span);

/* The next 2-D copy of the plan, of at most limit bytes (at least one row); returns its bytes, 0 at the end. */
uint64_t kvs_cuda_tables_next_2d(struct kvs_cuda_engine *engine, uint64_t limit, struct kvs_cu_memcpy2d *copy_p);

/* Exact for every dividend below 2^31. */
struct kvs_gpu_divisor kvs_cuda_divisor(uint32_t value);

#endif
