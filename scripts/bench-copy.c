/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The limit that scripts/bench compares with: one process copies the bytes of a request with memcpy, run by run, from
 * the layout of the prefill ranks to that of the decode ranks, all of it in its own memory. Also how long the plans
 * for that take to build.
 *
 *   bench-copy PREFILL_TP DECODE_TP PAGE_SIZE REPEAT POOL...      POOL: layers:heads:key:value:pages
 *
 * key and value are bytes per head and token. Prints medians: "bytes=... runs=... run=... copy_ms=... plan_ms=...".
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "../policy/plan.h"

#define MOST_POOLS  8
#define MOST_RANKS  64
#define MOST_REPEAT 1000
#define SPARE_PAGES 5

struct pool {
	unsigned layers;
	unsigned heads;
	unsigned key;
	unsigned value;
	unsigned pages;
};

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

static uint64_t median(uint64_t *values, unsigned count)
{
	qsort(values, count, sizeof *values, by_value);
	return values[count / 2];
}

static void fail(const char *text)
{
	fprintf(stderr, "bench-copy: %s\n", text);
	exit(1);
}

/* Memory that is there: every page of it touched. */
static void *touched(uint64_t size)
{
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		fail("not enough memory");
	memset(memory, 1, size);
	return memory;
}

static struct kvs_layout *make_layout(const struct pool *pools, unsigned pool_count, unsigned tp, unsigned rank,
                                      unsigned page_size)
{
	struct kvs_layout *layout = kvs_layout_new(pool_count);
	if (!layout)
		fail("not enough memory");
	layout->tp_size = tp;
	layout->tp_rank = rank;
	layout->pp_size = 1;
	layout->page_size = page_size;
	snprintf(layout->dtype, sizeof layout->dtype, "bfloat16");
	layout->head_rule = KVS_HEADS_REPLICATED;
	for (unsigned c = 0; c < pool_count; c++) {
		const struct pool *pool = &pools[c];
		uint64_t heads = pool->heads > tp ? pool->heads / tp : 1;
		struct kvs_component *component = &layout->components[c];
		snprintf(component->type, sizeof component->type, c == 0 ? "kv" : "swa");
		component->order = KVS_ORDER_NHD;
		if (!kvs_layout_set_tensors(layout, c, 2 * pool->layers))
			fail("too many layers");
		for (unsigned t = 0; t < 2 * pool->layers; t++) {
			struct kvs_tensor *tensor = &component->tensors[t];
			tensor->item_len = heads * page_size * (t < pool->layers ? pool->key : pool->value);
			tensor->length = tensor->item_len * (pool->pages + SPARE_PAGES);
			tensor->address = (uint64_t)(uintptr_t)touched(tensor->length);
			tensor->layer_id = KVS_NO_LAYER;
		}
	}
	return layout;
}

/* Different pages on each side, in no order, as after some hours of serving. */
static int32_t *shuffled(unsigned pages, unsigned seed)
{
	unsigned count = pages + SPARE_PAGES;
	int32_t *items = malloc(count * sizeof *items);
	if (!items)
		fail("not enough memory");
	for (unsigned i = 0; i < count; i++)
		items[i] = (int32_t)i;
	for (unsigned i = count - 1; i > 0; i--) {
		seed = seed * 1664525u + 1013904223u;
		unsigned j = (seed >> 8) % (i + 1);
		int32_t item = items[i];
		items[i] = items[j];
		items[j] = item;
	}
	return items;
}

static void copy(const struct kvs_plan *plan)
{
	for (uint32_t c = 0; c < plan->copy_count; c++) {
		const struct kvs_copy *copy = &plan->copies[c];
		for (uint32_t p = 0; p < plan->pair_count; p++) {
			uint64_t src = copy->src_base + plan->pairs[p].src * copy->src_item_stride;
			uint64_t dst = copy->dst_base + plan->pairs[p].dst * copy->dst_item_stride;
			for (uint64_t b = 0; b < copy->block_count; b++)
				memcpy((void *)(uintptr_t)(dst + b * copy->dst_block_stride),
				       (const void *)(uintptr_t)(src + b * copy->src_block_stride), copy->block_len);
		}
	}
}

int main(int argc, char **argv)
{
	if (argc < 6 || argc > 5 + MOST_POOLS)
		fail("arguments: PREFILL_TP DECODE_TP PAGE_SIZE REPEAT LAYERS:HEADS:KEY:VALUE:PAGES...");
	unsigned prefill_tp = (unsigned)atoi(argv[1]), decode_tp = (unsigned)atoi(argv[2]);
	unsigned page_size = (unsigned)atoi(argv[3]), repeat = (unsigned)atoi(argv[4]);
	if (prefill_tp < 1 || prefill_tp > MOST_RANKS || decode_tp < 1 || decode_tp > MOST_RANKS || page_size < 1 ||
	    repeat < 1 || repeat > MOST_REPEAT)
		fail("a number is out of range");
	struct pool pools[MOST_POOLS];
	unsigned pool_count = (unsigned)argc - 5;
	int32_t *src_items[MOST_POOLS], *dst_items[MOST_POOLS];
	for (unsigned c = 0; c < pool_count; c++) {
		struct pool *p = &pools[c];
		if (sscanf(argv[5 + c], "%u:%u:%u:%u:%u", &p->layers, &p->heads, &p->key, &p->value, &p->pages) != 5)
			fail("a pool is LAYERS:HEADS:KEY:VALUE:PAGES");
		src_items[c] = shuffled(p->pages, c + 1);
		dst_items[c] = shuffled(p->pages, c + 100);
	}
	struct kvs_layout *prefill[MOST_RANKS], *decode[MOST_RANKS];
	for (unsigned r = 0; r < prefill_tp; r++)
		prefill[r] = make_layout(pools, pool_count, prefill_tp, r, page_size);
	for (unsigned d = 0; d < decode_tp; d++)
		decode[d] = make_layout(pools, pool_count, decode_tp, d, page_size);

	uint64_t copy_ns[MOST_REPEAT], plan_ns[MOST_REPEAT];
	uint64_t bytes = 0, runs = 0, run = 0;
	for (unsigned turn = 0; turn < repeat; turn++) {
		copy_ns[turn] = plan_ns[turn] = bytes = runs = 0;
		for (unsigned r = 0; r < prefill_tp; r++)
			for (unsigned d = 0; d < decode_tp; d++) {
				if (prefill_tp > decode_tp ? r / (prefill_tp / decode_tp) != d
				                           : d / (decode_tp / prefill_tp) != r)
					continue;
				for (unsigned c = 0; c < pool_count; c++) {
					struct kvs_plan *plan;
					struct kvs_verdict verdict;
					uint64_t start = now_ns();
					if (!kvs_plan_build(prefill[r], decode[d], c, src_items[c], pools[c].pages,
					                    dst_items[c], pools[c].pages, &plan, &verdict))
						fail(verdict.text.s);
					uint64_t built = now_ns();
					copy(plan);
					copy_ns[turn] += now_ns() - built;
					plan_ns[turn] += built - start;
					bytes += plan->bytes;
					runs += plan->runs;
					if (c == 0 && plan->copy_count > 0)
						run = plan->copies[0].block_len;
					kvs_plan_free(plan);
				}
			}
	}
	printf("bytes=%" PRIu64 " runs=%" PRIu64 " run=%" PRIu64 " copy_ms=%.3f plan_ms=%.3f\n", bytes, runs, run,
	       (double)median(copy_ns, repeat) / 1e6, (double)median(plan_ns, repeat) / 1e6);
	return 0;
}
