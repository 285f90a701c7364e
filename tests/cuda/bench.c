/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "../../transport/cuda_engine.h"
#include "model.h"

#define ROUNDS   7     /* on a GPU; the double is timed once */
#define RUNS_MAX 20000 /* of one copy per run: more are extrapolated */
#define PAGE     64
#define PARTS    2 /* a request: pages of the full layers, and of the sliding ones */

struct model {
	const char *name;
	uint32_t full_layers, sliding_layers;
	uint32_t window; /* tokens of the sliding layers that are sent */
	uint32_t heads, width;
};

static const struct model models[] = {{"gpt-oss-120b", 18, 18, 128, 8, 128}, {"gemma-3-27b", 10, 52, 1024, 16, 256}};
static const uint32_t sizes[][2] = {{4, 2}, {2, 4}, {8, 2}};

/* What goes from one prefill rank to one decode rank of a request. */
struct part {
	struct rank p, d;
	uint32_t pages;
	int32_t *src, *dst;
	struct kvs_plan *plan;
};

/* Milliseconds. */
struct times {
	double all, plan, tables, launch;
};

static int rounds;

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
	qsort(values, (size_t)rounds, sizeof(values[0]), compare);
	return values[rounds / 2];
}

static struct part part_new(const struct driver *driver, const struct model *model, uint32_t layers, uint32_t tokens,
                            const uint32_t *size)
{
	struct part part = {.pages = tokens / PAGE};
	struct shape shape = {.layers = layers,
	                      .heads = model->heads,
	                      .page = PAGE,
	                      .items = part.pages,
	                      .k_width = model->width,
	                      .v_width = model->width};
	part.p = rank_new(driver, &shape, size[0], 0, 0, KVS_CUDA_LEGACY, 1, 0);
	part.d = rank_new(driver, &shape, size[1], 0, 0, KVS_CUDA_LEGACY, 1, 0);
	part.src = calloc(part.pages, sizeof(*part.src));
	part.dst = calloc(part.pages, sizeof(*part.dst));
	CHECK(part.src != NULL && part.dst != NULL);
	for (uint32_t i = 0; i < part.pages; i++) {
		part.src[i] = (int32_t)((i * 7919u) % part.pages);
		part.dst[i] = (int32_t)(part.pages - 1 - i);
	}
	return part;
}

static void part_free(const struct driver *driver, struct part *part)
{
	free(part->src);
	free(part->dst);
	rank_free(driver, &part->p);
	rank_free(driver, &part->d);
}

static struct kvs_plan *plan_of(const struct part *part, uint32_t pages)
{
	struct kvs_plan *plan = NULL;
	struct kvs_verdict verdict;
	memset(&verdict, 0, sizeof(verdict));
	CHECK(kvs_plan_build(part->p.layout, part->d.layout, 0, part->src, pages, part->dst, pages, &plan, &verdict),
	      "%s", verdict.text.s);
	return plan;
}

/* One copy of so many bytes from one place to another, in chunks as long as the shorter pool allows. */
static double linear(const struct driver *driver, struct kvs_cuda_engine *engine, const struct part *part,
                     uint64_t bytes)
{
	double times[ROUNDS];
	uint64_t most = part->p.size < part->d.size ? part->p.size : part->d.size;
	for (int i = 0; i < rounds; i++) {
		double began = now_ms();
		for (uint64_t left = bytes; left > 0;) {
			uint64_t size = left < most ? left : most;
			CHECK(driver->MemcpyDtoDAsync(part->d.block.address, part->p.block.address, size,
			                              engine->stream) == 0);
			left -= size;
		}
		CHECK(driver->cuda->StreamSynchronize(engine->stream) == 0);
		times[i] = now_ms() - began;
	}
	return median(times);
}

/* A whole request, as the decode's agent runs it: plan, tables, launch, and until the last byte is in place. */
static struct times request(struct kvs_cuda_engine *engine, const struct part *parts, uint32_t pages,
                            enum kvs_cuda_method method)
{
	struct times times = {.all = 0};
	struct kvs_text text = {.s = ""};
	for (int i = 0; i < PARTS; i++) {
		double began = now_ms();
		uint32_t some = pages != 0 && pages < parts[i].pages ? pages : parts[i].pages;
		struct kvs_plan *plan = plan_of(&parts[i], some);
		double planned = now_ms();
		CHECK(kvs_cuda_engine_begin(engine, plan, KVS_GPU_DIRECT, NULL, method, &text), "%s", text.s);
		double written = now_ms();
		CHECK(kvs_cuda_engine_launch(engine, &text), "%s", text.s);
		double launched = now_ms();
		CHECK(engine_wait(engine, &text), "%s", text.s);
		while (engine->position < plan->bytes)
			CHECK(engine_step(engine, &text), "%s", text.s);
		times.all += now_ms() - began;
		times.plan += planned - began;
		times.tables += written - planned;
		times.launch += launched - written;
		kvs_plan_free(plan);
	}
	return times;
}

static struct times requests(struct kvs_cuda_engine *engine, const struct part *parts, uint32_t pages,
                             enum kvs_cuda_method method)
{
	double all[ROUNDS], plan[ROUNDS], tables[ROUNDS], launch[ROUNDS];
	/* The size of a piece is learnt. */
	for (int i = 0; i < rounds - 1; i++)
		(void)request(engine, parts, pages, method);
	for (int i = 0; i < rounds; i++) {
		struct times one = request(engine, parts, pages, method);
		all[i] = one.all;
		plan[i] = one.plan;
		tables[i] = one.tables;
		launch[i] = one.launch;
	}
	return (struct times){
	        .all = median(all), .plan = median(plan), .tables = median(tables), .launch = median(launch)};
}

/* The CPU's part of a request before the launch, a few times in a row: what a server that is at work has. */
static void prepare(struct kvs_cuda_engine *engine, const struct part *parts, struct times *times)
{
	double plan[ROUNDS], tables[ROUNDS];
	int before = rounds;
	struct kvs_text text = {.s = ""};
	rounds = ROUNDS;
	for (int round = 0; round < ROUNDS; round++) {
		plan[round] = tables[round] = 0;
		for (int i = 0; i < PARTS; i++) {
			double began = now_ms();
			struct kvs_plan *made = plan_of(&parts[i], parts[i].pages);
			double planned = now_ms();
			CHECK(kvs_cuda_engine_begin(engine, made, KVS_GPU_DIRECT, NULL, KVS_CUDA_METHOD_KERNEL, &text),
			      "%s", text.s);
			tables[round] += now_ms() - planned;
			plan[round] += planned - began;
			kvs_cuda_engine_drain(engine);
			kvs_plan_free(made);
		}
	}
	times->plan = median(plan);
	times->tables = median(tables);
	rounds = before;
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

/* Calls of the driver for one request whose parts are one piece each; only the double counts them. */
static uint64_t calls_of(const struct driver *driver, struct kvs_cuda_engine *engine, const struct part *parts)
{
	uint64_t calls = 0, piece = engine->piece;
	for (int i = 0; i < PARTS; i++) {
		struct kvs_plan *plan = plan_of(&parts[i], parts[i].pages);
		calls += engine_calls(driver, engine, plan);
		kvs_plan_free(plan);
	}
	engine->piece = piece;
	return calls;
}

static void measure(const struct driver *driver, struct kvs_cuda_engine *engine, const struct model *model,
                    const uint32_t *size, uint32_t tokens)
{
	uint32_t window = model->window < tokens ? model->window : tokens;
	struct part parts[PARTS] = {part_new(driver, model, model->full_layers, tokens, size),
	                            part_new(driver, model, model->sliding_layers, window, size)};
	uint64_t bytes = 0, runs = 0;
	double each = 0;
	for (int i = 0; i < PARTS; i++) {
		struct kvs_plan *plan = plan_of(&parts[i], parts[i].pages);
		bytes += plan->bytes;
		runs += plan->runs;
		each += per_run(driver, engine, plan);
		kvs_plan_free(plan);
	}
	double one_copy = linear(driver, engine, &parts[0], bytes);
	struct times kernel = requests(engine, parts, 0, KVS_CUDA_METHOD_KERNEL);
	struct times copies = requests(engine, parts, 0, KVS_CUDA_METHOD_2D);
	if (driver->calls != NULL)
		prepare(engine, parts, &kernel);
	printf("{\"model\": \"%s\", \"prefill\": %u, \"decode\": %u, \"tokens\": %u, \"bytes\": %" PRIu64
	       ", \"runs\": %" PRIu64 ", \"one_copy_ms\": %.4f, \"kernel_ms\": %.4f, \"copies_2d_ms\": %.4f, "
	       "\"per_run_ms\": %.3f, \"plan_us\": %.2f, \"tables_us\": %.2f, \"launch_us\": %.2f",
	       model->name, size[0], size[1], tokens, bytes, runs, one_copy, kernel.all, copies.all, each,
	       kernel.plan * 1e3, kernel.tables * 1e3, kernel.launch * 1e3);
	if (driver->calls != NULL)
		printf(", \"calls\": %" PRIu64 "}\n", calls_of(driver, engine, parts));
	else
		printf(", \"one_page_us\": %.1f}\n", requests(engine, parts, 1, KVS_CUDA_METHOD_KERNEL).all * 1e3);
	for (int i = 0; i < PARTS; i++)
		part_free(driver, &parts[i]);
}

int bench_main(unsigned tokens)
{
	const struct driver *driver = driver_start(0);
	struct kvs_cuda_engine engine;
	struct kvs_text text = {.s = ""};
	char uuid[KVS_CUDA_UUID_TEXT];
	struct block block = block_new(driver, 0, KVS_CUDA_LEGACY, 4096, 1);
	struct kvs_cuda_gpu *gpu = kvs_cuda_gpu_of(driver->cuda, block.address, &text);
	CHECK(gpu != NULL && kvs_cuda_engine_open(&engine, gpu, &text), "%s", text.s);
	setvbuf(stdout, NULL, _IOLBF, 0);
	rounds = driver->calls != NULL ? 1 : ROUNDS;
	kvs_cuda_uuid_text(&gpu->uuid, uuid);
	printf("{\"driver\": \"%s\", \"version\": %d, \"gpu\": \"%s\"}\n", driver->calls != NULL ? "double" : "real",
	       driver->cuda->version, uuid);
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
