/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "../../transport/cuda_engine.h"
#include "model.h"

#define ROUNDS   7
#define RUNS_MAX 20000 /* of one copy per run: more are extrapolated */

struct model {
	const char *name;
	uint32_t layers, heads, width;
};

static const struct model models[] = {{"gpt-oss-120b", 36, 8, 128}, {"gemma-3-27b", 62, 16, 256}};
static const uint32_t sizes[][2] = {{4, 2}, {2, 4}, {8, 2}};

struct result {
	double linear_ms, kernel_ms, copies_ms, per_run_ms, plan_us, begin_us;
};

static double now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double median(double *values)
{
	qsort(values, ROUNDS, sizeof(values[0]), compare);
	return values[ROUNDS / 2];
}

/* One copy of so many bytes from one place to another, in chunks as long as the shorter pool allows. */
static double linear(const struct driver *driver, struct kvs_cuda_engine *engine, const struct rank *p,
                     const struct rank *d, uint64_t bytes)
{
	double times[ROUNDS];
	uint64_t most = p->size < d->size ? p->size : d->size;
	for (int i = 0; i < ROUNDS; i++) {
		double began = now_ms();
		for (uint64_t left = bytes; left > 0;) {
			uint64_t part = left < most ? left : most;
			CHECK(driver->MemcpyDtoDAsync(d->block.address, p->block.address, part, engine->stream) == 0);
			left -= part;
		}
		CHECK(driver->cuda->StreamSynchronize(engine->stream) == 0);
		times[i] = now_ms() - began;
	}
	return median(times);
}

static double planned(struct kvs_cuda_engine *engine, const struct kvs_plan *plan, enum kvs_cuda_method method,
                      double *begin_us_p)
{
	double times[ROUNDS], begins[ROUNDS];
	struct kvs_text text = {.s = ""};
	for (int i = 0; i < ROUNDS; i++) {
		double began = now_ms();
		CHECK(kvs_cuda_engine_begin(engine, plan, KVS_GPU_DIRECT, NULL, method, &text), "%s", text.s);
		begins[i] = (now_ms() - began) * 1e3;
		while (engine->position < plan->bytes)
			CHECK(engine_step(engine, &text), "%s", text.s);
		times[i] = now_ms() - began;
	}
	*begin_us_p = median(begins);
	return median(times);
}

/* What an engine with a descriptor per run does. */
static double per_run(const struct driver *driver, struct kvs_cuda_engine *engine, const struct kvs_plan *plan)
{
	struct kvs_plan_iter iter;
	struct kvs_run run;
	uint64_t count = 0;
	double began = now_ms();
	kvs_plan_seek(&iter, plan, 0);
	while (count < RUNS_MAX && kvs_plan_next(&iter, UINT64_MAX, &run)) {
		CHECK(driver->MemcpyDtoDAsync(run.dst, run.src, run.len, engine->stream) == 0);
		count++;
	}
	CHECK(driver->cuda->StreamSynchronize(engine->stream) == 0);
	return (now_ms() - began) * ((double)plan->runs / (double)count);
}

static void measure(const struct driver *driver, struct kvs_cuda_engine *engine, const struct model *model,
                    const uint32_t *size, uint32_t tokens)
{
	struct shape shape = {.layers = (model->layers + 1) / 2, /* two components */
	                      .heads = model->heads,
	                      .page = 64,
	                      .items = tokens / 64,
	                      .k_width = model->width,
	                      .v_width = model->width};
	struct rank p = rank_new(driver, &shape, size[0], 0, 0, KVS_CUDA_LEGACY, 1, 0);
	struct rank d = rank_new(driver, &shape, size[1], 0, 0, KVS_CUDA_LEGACY, 1, 0);
	int32_t *src = calloc(shape.items, sizeof(*src)), *dst = calloc(shape.items, sizeof(*dst));
	struct kvs_plan *plan = NULL;
	struct kvs_verdict verdict;
	struct result r;
	double ignored;
	CHECK(src != NULL && dst != NULL);
	for (uint32_t i = 0; i < shape.items; i++) {
		src[i] = (int32_t)((i * 7919u) % shape.items);
		dst[i] = (int32_t)(shape.items - 1 - i);
	}
	memset(&verdict, 0, sizeof(verdict));
	double began = now_ms();
	CHECK(kvs_plan_build(p.layout, d.layout, 0, src, shape.items, dst, shape.items, &plan, &verdict), "%s",
	      verdict.text.s);
	r.plan_us = (now_ms() - began) * 1e3;
	r.linear_ms = linear(driver, engine, &p, &d, plan->bytes);
	r.kernel_ms = planned(engine, plan, KVS_CUDA_METHOD_KERNEL, &r.begin_us);
	r.copies_ms = planned(engine, plan, KVS_CUDA_METHOD_2D, &ignored);
	r.per_run_ms = per_run(driver, engine, plan);
	printf("%-13s %u->%u %6u tokens %6" PRIu64 " B runs %7.1f MB: one copy %8.3f ms, kernel %8.3f ms (%.2f of it), "
	       "2-D %8.3f ms, per run %9.1f ms (%.0f times the kernel), plan %.0f us, tables %.0f us\n",
	       model->name, size[0], size[1], tokens, plan->bytes / plan->runs, (double)plan->bytes / 1e6, r.linear_ms,
	       r.kernel_ms, r.linear_ms / r.kernel_ms, r.copies_ms, r.per_run_ms, r.per_run_ms / r.kernel_ms, r.plan_us,
	       r.begin_us);
	printf("{\"model\": \"%s\", \"prefill\": %u, \"decode\": %u, \"tokens\": %u, \"bytes\": %" PRIu64
	       ", \"runs\": %" PRIu64 ", \"one_copy_ms\": %.4f, \"kernel_ms\": %.4f, \"copies_2d_ms\": %.4f, "
	       "\"per_run_ms\": %.3f, \"plan_us\": %.1f, \"tables_us\": %.1f}\n",
	       model->name, size[0], size[1], tokens, plan->bytes, plan->runs, r.linear_ms, r.kernel_ms, r.copies_ms,
	       r.per_run_ms, r.plan_us, r.begin_us);
	kvs_plan_free(plan);
	free(src);
	free(dst);
	rank_free(driver, &p);
	rank_free(driver, &d);
}

int bench_main(unsigned tokens)
{
	const struct driver *driver = driver_start(0);
	struct kvs_cuda_engine engine;
	struct kvs_text text = {.s = ""};
	struct block block = block_new(driver, 0, KVS_CUDA_LEGACY, 4096, 1);
	struct kvs_cuda_gpu *gpu = kvs_cuda_gpu_of(driver->cuda, block.address, &text);
	CHECK(gpu != NULL && kvs_cuda_engine_open(&engine, gpu, &text), "%s", text.s);
	for (size_t m = 0; m < sizeof(models) / sizeof(models[0]); m++) {
		for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
			measure(driver, &engine, &models[m], sizes[s], tokens / 4);
			measure(driver, &engine, &models[m], sizes[s], tokens);
		}
	}
	kvs_cuda_engine_close(&engine);
	kvs_cuda_gpu_put(gpu);
	block_free(driver, &block);
	return 0;
}
