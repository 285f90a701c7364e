/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes between two processes: every shape, every route, byte by byte. */
#include <criterion/criterion.h>

#include "support/agent_fleet.h"

static const struct fleet_shape shapes[] = {
        {2, 1, 8, 3, 16, 7, 2, 128, 128}, /* P > D */
        {1, 2, 8, 3, 16, 7, 2, 128, 128}, /* P < D */
        {4, 2, 8, 2, 1, 33, 2, 64, 32},   /* one token to a page, unequal K and V */
        {2, 8, 4, 2, 16, 5, 2, 192, 128}, /* replicated at the decode */
        {8, 2, 4, 2, 16, 5, 2, 192, 128}, /* replicated at the prefill: skips */
        {1, 4, 8, 1, 64, 70, 1, 256, 0},  /* more than one slot, no V */
};

static void all_shapes(const char *transports, const char *route)
{
	fleet_prefill_config.transports = fleet_decode_config.transports = transports;
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		struct fleet *fleet = fleet_start(&shapes[i]);
		fleet_fill(fleet);
		for (uint32_t room = 0; room < shapes[i].rooms; room++) {
			cr_expect(fleet_transfer(fleet, room), "shape %zu room %u", i, room);
			cr_expect(fleet_wrong(fleet, room) == 0, "shape %zu room %u: %llu bytes wrong", i, room,
			          (unsigned long long)fleet_wrong(fleet, room));
		}
		cr_expect(fleet_strayed(fleet) == 0);
		cr_expect(fleet_log_count(route) == shapes[i].rooms * shapes[i].decode_tp, "shape %zu: %u lines", i,
		          fleet_log_count(route));
		fleet_log_clear();
		fleet_stop(fleet);
	}
}

Test(transport_basic, host, .timeout = 120)
{
	all_shapes("cuda_ipc,rdma,host,tcp,engine", "done: route=host components=1 bytes=");
}

Test(transport_basic, tcp, .timeout = 120)
{
	all_shapes("tcp", "done: route=tcp components=1 bytes=");
}
