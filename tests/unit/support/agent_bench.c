/* SPDX-License-Identifier: Apache-2.0 */
#include "agent_bench.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAIRS 16 /* of ranks in a request */

void bench_need(const char *what, const char *transport, uint32_t timeout_ms)
{
	const char *chosen = getenv("KVS_BENCH");
	if (chosen == NULL || strcmp(chosen, what) != 0)
		cr_skip("KVS_BENCH is not %s", what);
	fleet_prefill_config.transports = fleet_decode_config.transports = transport;
	fleet_prefill_config.timeout_ms = fleet_decode_config.timeout_ms = timeout_ms;
}

uint64_t bench_bytes(const struct fleet_shape *shape)
{
	return (uint64_t)shape->layers * shape->pages * shape->page_size * shape->heads *
	       (shape->k_width + shape->v_width);
}

double bench_request(struct fleet *fleet, uint32_t pairs)
{
	const struct fleet_shape *shape = &fleet->shape;
	uint64_t generations[FLEET_RANKS], began = UINT64_MAX, ended = 0;
	struct fleet_job jobs[PAIRS];
	uint32_t count = 0;
	for (uint32_t d = 0; d < shape->decode_tp; d++)
		generations[d] = fleet_open(fleet, d, 0);
	for (uint32_t r = 0; r < shape->prefill_tp; r++) {
		uint32_t targets, first = fleet_first_target(fleet, r, &targets);
		for (uint32_t d = first; d < first + targets && count < pairs; d++) {
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

void bench_end(struct fleet *fleet, const char *what)
{
	fflush(stdout); /* the next fleet is forked, and its end would write what is not written yet once more */
	cr_expect(fleet_wrong(fleet, 0) == 0, "%s: %llu bytes wrong", what, (unsigned long long)fleet_wrong(fleet, 0));
	fleet_stop(fleet);
}
