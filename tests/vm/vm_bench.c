/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times requests over the rdma transport, for scripts/bench-vm, which has set the devices up and reads the lines that
 * begin with "bench:". KVS_BENCH names what is measured; without it every case is skipped.
 */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/agent_bench.h"
#include "transport/rdma.h"

#define REPEAT 4

static void need(const char *what)
{
	bench_need(what, "rdma", 120000);
}

static void measure(const struct fleet_shape *shape, const char *what, uint32_t repeat)
{
	struct fleet *fleet = fleet_start(shape);
	fleet_fill(fleet);
	(void)bench_request(fleet, UINT32_MAX); /* makes the pairs */
	for (uint32_t i = 0; i < repeat; i++)
		printf("bench: %s seconds=%.6f bytes=%llu\n", what, bench_request(fleet, UINT32_MAX),
		       (unsigned long long)bench_bytes(shape));
	bench_end(fleet, what);
}

/* gpt-oss-120b: 8 heads of 64 values of 2 bytes, pages of 64 tokens, 8,192 tokens, 6 full-attention layers. */
Test(vm_bench, down, .timeout = 280)
{
	need("down");
	measure(&(struct fleet_shape){4, 2, 8, 6, 64, 128, 1, 128, 128}, "down", REPEAT);
}

Test(vm_bench, up, .timeout = 280)
{
	need("up");
	measure(&(struct fleet_shape){2, 4, 8, 6, 64, 128, 1, 128, 128}, "up", REPEAT);
}

/* 1 to 2, the slices of each length read directly and packed. */
Test(vm_bench, rule, .timeout = 280)
{
	need("rule");
	for (uint32_t run = 128; run <= 32768; run *= 2) {
		/* Items long enough that a packed piece has few places; the oracle knows words up to 8 KiB of a head.
		 */
		uint32_t width = run < 8192 ? run : 8192, heads = 2 * run / width;
		struct fleet_shape shape = {1, 2, heads, 1, 16, 0, 1, width, width};
		/* So that the shortest do not take minutes: each one READ. */
		uint32_t total = run * 2048 < 8u << 20 ? run * 2048 : 8u << 20;
		shape.pages = total / (4 * run * shape.page_size);
		for (int packed = 0; packed < 2; packed++) {
			char what[64];
			kvs_rdma_direct_min = packed != 0 ? UINT32_MAX : 0;
			(void)snprintf(what, sizeof(what), "rule run=%u packed=%d", run, packed);
			measure(&shape, what, REPEAT);
		}
	}
}
