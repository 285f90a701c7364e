/* SPDX-License-Identifier: Apache-2.0 */
/* When a decode rank may count on its prefill: both roles in this process. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <time.h>

#include "support/shapes.h"
#include "transport/agent.h"
#include "transport/agreed.h"
#include "transport/state.h"

#define PAGE   16
#define ITEMS  4
#define WIDTH  64
#define HEADS  4
#define LAYERS 2

static uint64_t add(enum kvs_role role, uint32_t tp_size, uint32_t tp_rank)
{
	struct kvs_text text;
	uint64_t item = shape_item(HEADS, tp_size, PAGE, WIDTH);
	struct kvs_layout *layout = shape_kv(tp_size, tp_rank, PAGE, LAYERS, item, item, ITEMS);
	/* Nothing is moved: all tensors may share one piece of memory. */
	void *memory = shape_take(item * ITEMS);
	for (uint32_t t = 0; t < layout->components[0].tensor_count; t++)
		layout->components[0].tensors[t].address = (uint64_t)(uintptr_t)memory;
	uint64_t id = kvs_endpoint_add(role, layout, "127.0.0.1", &text);
	cr_assert(id != 0, "%s", text.s);
	kvs_layout_free(layout);
	return id;
}

static bool agreed_within(uint64_t endpoint, uint32_t prefill_tp, bool wanted, uint32_t ms)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	uint64_t end = kvs_now_ns() + ms * UINT64_C(1000000);
	while (kvs_endpoint_agreed(endpoint, prefill_tp) != wanted && kvs_now_ns() < end)
		nanosleep(&pause, NULL);
	return kvs_endpoint_agreed(endpoint, prefill_tp);
}

static uint64_t add_peer(uint64_t decode)
{
	struct kvs_text text;
	uint8_t record[KVS_RECORD_MAX];
	size_t size = kvs_endpoint_record(decode, record);
	uint64_t peer = kvs_peer_add(record, size, &text);
	cr_assert(peer != 0, "%s", text.s);
	return peer;
}

static void connect_to(uint64_t prefill, uint64_t peer)
{
	struct kvs_verdict verdict;
	kvs_peer_verdict(prefill, peer, 0, &verdict);
	cr_assert(verdict.action == KVS_ACT_SLICE || verdict.action == KVS_ACT_COPY, "%s", verdict.text.s);
}

Test(agent_agreed, all_ranks_of_a_group, .timeout = 60)
{
	uint64_t decode = add(KVS_ROLE_DECODE, 1, 0);
	uint64_t first = add(KVS_ROLE_PREFILL, 2, 0);
	uint64_t second = add(KVS_ROLE_PREFILL, 2, 1);
	cr_expect(!kvs_endpoint_agreed(decode, 2), "nobody has connected");
	uint64_t peer = add_peer(decode);
	connect_to(first, peer);
	cr_expect(!agreed_within(decode, 2, true, 100), "one rank of two has");
	connect_to(second, peer);
	cr_expect(agreed_within(decode, 2, true, 5000));
	cr_expect(!kvs_endpoint_agreed(decode, 4), "it is a prefill of another size");
	cr_expect(!kvs_endpoint_agreed(decode, 0));
	cr_expect(!kvs_endpoint_agreed(first, 2), "a prefill is no decode");
	cr_expect(!kvs_endpoint_agreed(decode + 1000, 2));
	kvs_endpoint_remove(second);
	cr_expect(!agreed_within(decode, 2, false, 5000), "a rank is gone");
	kvs_endpoint_remove(first);
	kvs_endpoint_remove(decode);
}

Test(agent_agreed, one_rank_for_several, .timeout = 60)
{
	uint64_t decode = add(KVS_ROLE_DECODE, 4, 3);
	uint64_t other = add(KVS_ROLE_PREFILL, 2, 1);
	cr_expect(!kvs_endpoint_agreed(decode, 3), "neither size is a multiple of the other");
	connect_to(other, add_peer(decode));
	cr_expect(agreed_within(decode, 2, true, 5000), "decode rank 3 of 4 is served by prefill rank 1 of 2");
	kvs_endpoint_remove(other);
	kvs_endpoint_remove(decode);
}
