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

#include "support/agent_fleet.h"
#include "transport/rdma.h"

#define REPEAT 4
#define PAIRS  16 /* of ranks in a request */

static void need(const char *what)
{
	const char *chosen = getenv("KVS_BENCH");
	if (chosen == NULL || strcmp(chosen, what) != 0)
		cr_skip("KVS_BENCH is not %s", what);
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma";
	fleet_prefill_config.timeout_ms = fleet_decode_config.timeout_ms = 120000;
}

/* One request: every rank's pull at once, from the first to begin to the last to end. Seconds. */
static double request(struct fleet *fleet)
{
	const struct fleet_shape *shape = &fleet->shape;
	uint64_t generations[FLEET_RANKS], began = UINT64_MAX, ended = 0;
	struct fleet_job jobs[PAIRS];
	uint32_t count = 0;
	for (uint32_t d = 0; d < shape->decode_tp; d++)
		generations[d] = fleet_open(fleet, d, 0);
	for (uint32_t r = 0; r < shape->prefill_tp; r++) {
		uint32_t targets, first = fleet_first_target(fleet, r, &targets);
		for (uint32_t d = first; d < first + targets; d++) {
			struct kvs_pull pull = fleet_pull(fleet, r, d, 0, generations[d]);
			cr_assert(count < PAIRS);
			fleet_begin(&jobs[count++], &pull);
		}
	}
	for (uint32_t i = 0; i < count; i++) {
		cr_assert(fleet_end(&jobs[i]), "%s", jobs[i].text.s);
		began = jobs[i].began_ns < began ? jobs[i].began_ns : began;
		ended = jobs[i].ended_ns > ended ? jobs[i].ended_ns : ended;
	}
	for (uint32_t d = 0; d < shape->decode_tp; d++)
		fleet_close(fleet, d, 0, KVS_ROOM_SUCCESS);
	return (double)(ended - began) / 1e9;
}

/* Of all ranks. */
static uint64_t bytes_of(const struct fleet_shape *shape)
{
	return (uint64_t)shape->layers * shape->pages * shape->page_size * shape->heads *
	       (shape->k_width + shape->v_width);
}

static void measure(const struct fleet_shape *shape, const char *what, uint32_t repeat)
{
	struct fleet *fleet = fleet_start(shape);
	fleet_fill(fleet);
	(void)request(fleet); /* makes the pairs */
	for (uint32_t i = 0; i < repeat; i++)
		printf("bench: %s seconds=%.6f bytes=%llu\n", what, request(fleet),
		       (unsigned long long)bytes_of(shape));
	fflush(stdout); /* the next fleet is forked, and its end would write what is not written yet once more */
	cr_expect(fleet_wrong(fleet, 0) == 0, "%s: %llu bytes wrong", what, (unsigned long long)fleet_wrong(fleet, 0));
	fleet_stop(fleet);
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
