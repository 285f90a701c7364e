/* SPDX-License-Identifier: Apache-2.0 */
/* Copy plans on one GPU: the kernel, 2-D copies, packing and unpacking, each against the byte oracle. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "../../transport/cuda_engine.h"
#include "../../transport/cuda_tables.h"
#include "model.h"

static uint64_t random_state = 42;

static uint32_t below(uint32_t n)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(random_state >> 33) % n;
}

/* Distinct items in a random order, sometimes with stretches that follow each other. */
static void choose(int32_t *items, uint32_t count, uint32_t of)
{
	int32_t all[1024];
	for (uint32_t i = 0; i < of; i++)
		all[i] = (int32_t)i;
	if (below(2) == 0) {
		for (uint32_t i = of - 1; i > 0; i--) {
			uint32_t j = below(i + 1);
			int32_t swap = all[i];
			all[i] = all[j];
			all[j] = swap;
		}
	}
	memcpy(items, all + below(of - count + 1), count * sizeof(items[0]));
}

enum way { KERNEL, COPIES, LINEAR, WAYS };

struct bench {
	const struct driver *driver;
	struct kvs_cuda_engine engine;
	struct kvs_cuda_gpu *gpu;
};

static struct bench begin(void)
{
	struct bench b = {.driver = driver_start(0)};
	struct kvs_text text = {.s = ""};
	struct block block = block_new(b.driver, 0, KVS_CUDA_LEGACY, 4096, 1);
	b.gpu = kvs_cuda_gpu_of(b.driver->cuda, block.address, &text);
	CHECK(b.gpu != NULL, "%s", text.s);
	CHECK(kvs_cuda_engine_open(&b.engine, b.gpu, &text), "%s", text.s);
	block_free(b.driver, &block);
	return b;
}

static void end(struct bench *b)
{
	kvs_cuda_engine_close(&b->engine);
	kvs_cuda_gpu_put(b->gpu);
	if (b->driver->live == NULL)
		return;
	CHECK(b->driver->live("streams") == 0 && b->driver->live("events") == 0);
	CHECK(b->driver->live("allocations") == 0 && b->driver->live("host") == 0 && b->driver->live("modules") == 0);
}

static void move_linear(struct bench *b, const struct kvs_plan *plan)
{
	struct kvs_text text = {.s = ""};
	uint8_t *stream = malloc(plan->bytes + 1);
	CHECK(kvs_cuda_engine_begin(&b->engine, plan, KVS_GPU_PACK, NULL, KVS_CUDA_METHOD_AUTO, &text), "%s", text.s);
	for (uint64_t at = 0; at < plan->bytes;) {
		uint64_t size = 1 + below(70000);
		size = size < plan->bytes - at ? size : plan->bytes - at;
		CHECK(kvs_cuda_engine_pack(&b->engine, stream + at, size, &text), "%s", text.s);
		at += size;
	}
	CHECK(kvs_cuda_engine_begin(&b->engine, plan, KVS_GPU_UNPACK, NULL, KVS_CUDA_METHOD_AUTO, &text), "%s", text.s);
	for (uint64_t at = 0; at < plan->bytes;) {
		uint64_t size = 1 + below(70000);
		size = size < plan->bytes - at ? size : plan->bytes - at;
		CHECK(kvs_cuda_engine_unpack(&b->engine, stream + at, size, &text), "%s", text.s);
		at += size;
	}
	free(stream);
}

static void move(struct bench *b, const struct kvs_plan *plan, enum way way, uint64_t piece)
{
	struct kvs_text text = {.s = ""};
	enum kvs_cuda_method method = way == KERNEL ? KVS_CUDA_METHOD_KERNEL : KVS_CUDA_METHOD_2D;
	if (way == LINEAR) {
		move_linear(b, plan);
		return;
	}
	CHECK(kvs_cuda_engine_begin(&b->engine, plan, KVS_GPU_DIRECT, NULL, method, &text), "%s", text.s);
	while (b->engine.position < plan->bytes) {
		uint64_t before = b->engine.position;
		b->engine.piece = piece != 0 ? piece : b->engine.piece;
		CHECK(engine_step(&b->engine, &text), "%s", text.s);
		CHECK(b->engine.position > before && b->engine.position <= plan->bytes);
	}
}

/* All pairs of ranks of P and D, both components, on one GPU. */
static void sweep_one(struct bench *b, const struct shape *shape, uint32_t p_size, uint32_t d_size, enum way way,
                      size_t shift, uint64_t piece)
{
	struct rank prefills[16];
	for (uint32_t r = 0; r < p_size; r++) {
		prefills[r] = rank_new(b->driver, shape, p_size, r, 0, KVS_CUDA_LEGACY, 1, shift);
		rank_fill(b->driver, &prefills[r]);
	}
	for (uint32_t d = 0; d < d_size; d++) {
		struct rank decode = rank_new(b->driver, shape, d_size, d, 0, KVS_CUDA_LEGACY, 1, shift);
		int32_t src[256], dst[256];
		uint32_t counts[COMPONENTS], count = 1 + below(shape->items);
		choose(src, count, shape->items);
		choose(dst, count, shape->items);
		counts[0] = count;
		counts[1] = 1 + below(count);
		rank_blank(b->driver, &decode);
		for (uint32_t r = 0; r < p_size; r++) {
			bool serves = p_size >= d_size ? r / (p_size / d_size) == d : d / (d_size / p_size) == r;
			for (uint32_t c = 0; c < COMPONENTS && serves; c++) {
				struct kvs_plan *plan = NULL;
				struct kvs_verdict verdict;
				memset(&verdict, 0, sizeof(verdict));
				CHECK(kvs_plan_build(prefills[r].layout, decode.layout, c, src, counts[c], dst,
				                     counts[c], &plan, &verdict),
				      "%s", verdict.text.s);
				if (plan->bytes > 0)
					move(b, plan, way, piece);
				kvs_plan_free(plan);
			}
		}
		uint64_t wrong = rank_verify(b->driver, &decode, src, dst, counts);
		CHECK(wrong == 0, "%u to %u, way %d: %" PRIu64 " bytes are wrong", p_size, d_size, (int)way, wrong);
		rank_free(b->driver, &decode);
	}
	for (uint32_t r = 0; r < p_size; r++)
		rank_free(b->driver, &prefills[r]);
}

static void sweep(void)
{
	static const uint32_t sizes[][2] = {{4, 2}, {2, 4}, {8, 2}, {2, 8}, {1, 4}, {4, 1}, {2, 1}, {1, 2}, {8, 4}};
	struct bench b = begin();
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		for (int way = 0; way < WAYS; way++) {
			/* Widths that allow 16, 8, 4, 2 and 1 byte at a time; fewer heads than ranks too. */
			static const uint32_t widths[][2] = {{128, 64}, {24, 40}, {20, 12}, {6, 10}, {3, 5}};
			const uint32_t *w = widths[below(5)];
			struct shape shape = {.layers = 1 + below(3),
			                      .heads = below(3) == 0 ? 2 : 8,
			                      .page = 1 + below(16),
			                      .items = 4 + below(40),
			                      .k_width = w[0],
			                      .v_width = w[1]};
			uint64_t piece = below(2) == 0 ? 0 : KVS_GPU_UNIT * (1 + below(3));
			size_t shift = below(3) == 0 ? 1 + below(15) : 0;
			sweep_one(&b, &shape, sizes[i][0], sizes[i][1], (enum way)way, shift, piece);
		}
	}
	end(&b);
}

/* Widths that are rounded, pages of one token and of many, all words. */
static void words(void)
{
	struct bench b = begin();
	for (uint32_t width = 1; width <= 64; width += width < 8 ? 1 : 7) {
		struct shape shape = {
		        .layers = 1, .heads = 4, .page = 1 + width % 5, .items = 32, .k_width = width, .v_width = 64};
		for (int way = 0; way < WAYS; way++)
			sweep_one(&b, &shape, 4, 2, (enum way)way, width % 3, 0);
	}
	end(&b);
}

/* More than the two halves of page-locked memory hold, and more than the first tables do. */
static void large(void)
{
	struct bench b = begin();
	struct shape shape = {.layers = 6, .heads = 8, .page = 16, .items = 200, .k_width = 128, .v_width = 128};
	for (int way = 0; way < WAYS; way++)
		sweep_one(&b, &shape, 2, 1, (enum way)way, 0, 0);
	struct kvs_text text = {.s = ""};
	size_t before = b.engine.table_size;
	CHECK(kvs_cuda_tables_reserve(&b.engine, before + 1, &text) && b.engine.table_size > before, "%s", text.s);
	end(&b);
}

static void divisors(void)
{
	for (int i = 0; i < 200000; i++) {
		uint32_t d = i < 5000 ? (uint32_t)i + 1 : 1 + below((1u << 30) - 1);
		struct kvs_gpu_divisor divisor = kvs_cuda_divisor(d);
		uint32_t xs[] = {0,
		                 d - 1,
		                 d,
		                 d + 1,
		                 2 * d - 1,
		                 0x7fffffff,
		                 below(0x7fffffff),
		                 0x7fffffff / d * d,
		                 0x7fffffff / d * d - 1};
		for (size_t k = 0; k < sizeof(xs) / sizeof(xs[0]); k++) {
			uint32_t x = xs[k] & 0x7fffffff;
			uint32_t q = (uint32_t)(((uint64_t)x * divisor.factor) >> divisor.shift);
			CHECK(q == x / d, "%u / %u", x, d);
		}
	}
}

/* Few long runs go to the copy engine, many short ones to the kernel; either can be asked for. */
static void rule(void)
{
	struct bench b = begin();
	const struct {
		struct shape shape;
		uint32_t count;
		bool by_kernel;
	} cases[] = {{{.layers = 1, .heads = 2, .page = 64, .items = 64, .k_width = 8192, .v_width = 8192}, 16, false},
	             {{.layers = 1, .heads = 2, .page = 64, .items = 64, .k_width = 128, .v_width = 128}, 64, true},
	             {{.layers = 20, .heads = 2, .page = 4, .items = 64, .k_width = 128, .v_width = 128}, 16, true}};
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct rank p = rank_new(b.driver, &cases[i].shape, 1, 0, 0, KVS_CUDA_LEGACY, 1, 0);
		struct kvs_plan *plan = NULL;
		struct kvs_verdict verdict;
		struct kvs_text text = {.s = ""};
		int32_t items[64];
		memset(&verdict, 0, sizeof(verdict));
		for (int n = 0; n < 64; n++)
			items[n] = cases[i].by_kernel ? 63 - n : n;
		CHECK(kvs_plan_build(p.layout, p.layout, 0, items, cases[i].count, items, cases[i].count, &plan,
		                     &verdict),
		      "%s", verdict.text.s);
		static const enum kvs_cuda_method methods[] = {KVS_CUDA_METHOD_AUTO, KVS_CUDA_METHOD_KERNEL,
		                                               KVS_CUDA_METHOD_2D};
		for (int m = 0; m < 3; m++) {
			CHECK(kvs_cuda_engine_begin(&b.engine, plan, KVS_GPU_DIRECT, NULL, methods[m], &text), "%s",
			      text.s);
			bool wanted = m == 0 ? cases[i].by_kernel : m == 1;
			CHECK(b.engine.by_kernel == wanted, "case %zu method %d", i, m);
		}
		kvs_plan_free(plan);
		kvs_cuda_engine_drain(&b.engine);
		rank_free(b.driver, &p);
	}
	end(&b);
}

/* The driver is called as often for many tokens as for few. */
static void calls_per_request(void)
{
	struct bench b = begin();
	uint64_t calls[2] = {0, 0};
	need_double(b.driver);
	for (int i = 0; i < 2; i++) {
		struct shape shape = {.layers = 18, .heads = 8, .page = 16, .items = 256, .k_width = 16, .v_width = 16};
		struct rank p = rank_new(b.driver, &shape, 1, 0, 0, KVS_CUDA_LEGACY, 1, 0);
		struct rank d = rank_new(b.driver, &shape, 2, 1, 0, KVS_CUDA_LEGACY, 1, 0);
		struct kvs_plan *plan = NULL;
		struct kvs_verdict verdict;
		int32_t items[256];
		uint32_t count = i == 0 ? 4 : 256;
		memset(&verdict, 0, sizeof(verdict));
		for (int n = 0; n < 256; n++)
			items[n] = 255 - n;
		CHECK(kvs_plan_build(p.layout, d.layout, 0, items, count, items, count, &plan, &verdict), "%s",
		      verdict.text.s);
		calls[i] = engine_calls(b.driver, &b.engine, plan);
		printf("       %u tokens, %" PRIu64 " runs: %" PRIu64 " calls of the driver\n", count * shape.page,
		       plan->runs, calls[i]);
		kvs_plan_free(plan);
		rank_free(b.driver, &p);
		rank_free(b.driver, &d);
	}
	CHECK(calls[0] == calls[1]);
	end(&b);
}

/* No call of ours disturbs a graph that the server captures, in whatever mode. */
static void capture(void)
{
	struct bench b = begin();
	kvs_cu_stream stream;
	void *graph = NULL;
	struct shape shape = {.layers = 2, .heads = 4, .page = 4, .items = 16, .k_width = 32, .v_width = 32};
	CHECK(b.driver->cuda->StreamCreateWithPriority(&stream, 1, 0) == 0);
	struct rank p = rank_new(b.driver, &shape, 1, 0, 0, KVS_CUDA_LEGACY, 1, 0);
	struct rank d = rank_new(b.driver, &shape, 2, 1, 0, KVS_CUDA_LEGACY, 1, 0);
	struct kvs_plan *plan = NULL;
	struct kvs_verdict verdict;
	struct kvs_text text = {.s = ""};
	struct kvs_cuda_memory *memory = NULL;
	int32_t items[] = {3, 1, 2};
	memset(&verdict, 0, sizeof(verdict));
	CHECK(kvs_plan_build(p.layout, d.layout, 0, items, 3, items, 3, &plan, &verdict), "%s", verdict.text.s);
	CHECK(b.driver->StreamBeginCapture(stream, KVS_CU_CAPTURE_MODE_GLOBAL) == 0);
	move(&b, plan, KERNEL, 0);
	move(&b, plan, COPIES, 0);
	move(&b, plan, LINEAR, 0);
	CHECK(kvs_cuda_memory_new(p.layout, &memory, &text), "%s", text.s);
	kvs_cuda_memory_free(memory);
	unsigned result = b.driver->StreamEndCapture(stream, &graph);
	CHECK(result == 0, "the capture was broken: %u", result);
	CHECK(b.driver->GraphDestroy(graph) == 0);
	/* The double does notice what is not allowed. */
	if (b.driver->fault != NULL) {
		kvs_cu_pointer pointer;
		CHECK(b.driver->StreamBeginCapture(stream, KVS_CU_CAPTURE_MODE_GLOBAL) == 0);
		CHECK(b.driver->cuda->MemAlloc(&pointer, 4096) == 900);
		CHECK(b.driver->StreamEndCapture(stream, &graph) == 901);
	}
	CHECK(b.driver->cuda->StreamDestroy(stream) == 0);
	kvs_plan_free(plan);
	rank_free(b.driver, &p);
	rank_free(b.driver, &d);
	end(&b);
}

/* Each call of the engine failing once: an answer that names it, nothing left, and the next plan goes through. */
static void faults(void)
{
	static const char *const opening[] = {"cuCtxPushCurrent",
	                                      "cuCtxGetStreamPriorityRange",
	                                      "cuStreamCreateWithPriority",
	                                      "cuEventCreate",
	                                      "cuMemHostAlloc",
	                                      "cuMemAlloc"};
	static const char *const running[] = {"cuCtxPushCurrent", "cuMemcpyHtoDAsync", "cuLaunchKernel",
	                                      "cuEventRecord",    "cuLaunchHostFunc",  "cuEventQuery"};
	struct bench b = begin();
	need_double(b.driver);
	for (size_t i = 0; i < sizeof(opening) / sizeof(opening[0]); i++) {
		struct kvs_cuda_engine engine;
		struct kvs_text text = {.s = ""};
		char list[96];
		(void)snprintf(list, sizeof(list), "%s=2", opening[i]);
		CHECK(b.driver->fault(list) == 0);
		CHECK(!kvs_cuda_engine_open(&engine, b.gpu, &text) && strstr(text.s, opening[i]) != NULL, "%s: %s",
		      opening[i], text.s);
		CHECK(b.driver->live("streams") == 1 && b.driver->live("events") == 1, "%s", opening[i]);
		CHECK(b.driver->live("allocations") == 1 && b.driver->live("host") == 1, "%s", opening[i]);
	}
	struct shape shape = {.layers = 1, .heads = 2, .page = 4, .items = 8, .k_width = 32, .v_width = 32};
	struct rank p = rank_new(b.driver, &shape, 1, 0, 0, KVS_CUDA_LEGACY, 1, 0);
	struct rank d = rank_new(b.driver, &shape, 2, 0, 0, KVS_CUDA_LEGACY, 1, 0);
	struct kvs_plan *plan = NULL;
	struct kvs_verdict verdict;
	int32_t items[] = {0, 1, 2};
	memset(&verdict, 0, sizeof(verdict));
	CHECK(kvs_plan_build(p.layout, d.layout, 0, items, 3, items, 3, &plan, &verdict), "%s", verdict.text.s);
	for (size_t i = 0; i < sizeof(running) / sizeof(running[0]); i++) {
		struct kvs_text text = {.s = ""};
		char list[96];
		(void)snprintf(list, sizeof(list), "%s=2", running[i]);
		CHECK(b.driver->fault(list) == 0);
		bool ok = kvs_cuda_engine_begin(&b.engine, plan, KVS_GPU_DIRECT, NULL, KVS_CUDA_METHOD_KERNEL, &text) &&
		          engine_step(&b.engine, &text);
		CHECK(!ok && strstr(text.s, running[i]) != NULL, "%s: %s", running[i], text.s);
		kvs_cuda_engine_drain(&b.engine);
		move(&b, plan, KERNEL, 0);
	}
	kvs_plan_free(plan);
	rank_free(b.driver, &p);
	rank_free(b.driver, &d);
	end(&b);
}

const struct test engine_tests[] = {
        {"engine.divisors", divisors}, {"engine.sweep", sweep},   {"engine.words", words},
        {"engine.large", large},       {"engine.rule", rule},     {"engine.calls per request", calls_per_request},
        {"engine.capture", capture},   {"engine.faults", faults}, {NULL, NULL}};
