/* SPDX-License-Identifier: Apache-2.0 */
/* Rooms between two real processes: what may be written, when no more, and who is told. */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/agent_faults.h"
#include "support/agent_fleet.h"

/* 8 MiB of each room from rank 0: 64 pieces, a third of a second of work for the slow transport. */
static const struct fleet_shape big = {2, 1, 8, 2, 64, 128, 3, 128, 128};
static const struct fleet_shape small = {2, 1, 8, 2, 16, 4, 3, 128, 128};

static struct fleet *start_with_fault(const struct fleet_shape *shape, void (*fault)(void), const char *order)
{
	fleet_child_setup = fault;
	fault();
	fleet_prefill_config.transports = fleet_decode_config.transports = order;
	struct fleet *fleet = fleet_start(shape);
	fleet_fill(fleet);
	return fleet;
}

static uint64_t ms_since(uint64_t began_ns)
{
	return (kvs_now_ns() - began_ns) / 1000000;
}

Test(agent_rooms, closed_rooms_are_not_written, .timeout = 60)
{
	struct fleet *fleet = fleet_start(&small);
	struct kvs_text text = {.s = ""};
	fleet_fill(fleet);
	/* Never opened, closed, and an earlier generation of an open one. */
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, 0);
	cr_expect(!kvs_pull(&pull, &text) && strstr(text.s, "closed") != NULL, "%s", text.s);
	uint64_t first = fleet_open(fleet, 0, 1);
	fleet_close(fleet, 0, 1, KVS_ROOM_FAILURE);
	fleet_close(fleet, 0, 1, KVS_ROOM_FAILURE);
	pull = fleet_pull(fleet, 0, 0, 1, first);
	cr_expect(!kvs_pull(&pull, &text) && strstr(text.s, "closed") != NULL, "%s", text.s);
	cr_expect(fleet_state(fleet, 0, 1, NULL) == KVS_ROOM_UNKNOWN);
	uint64_t second = fleet_open(fleet, 0, 1);
	cr_expect(second > first);
	kvs_source_forget(fleet->endpoints[0], 2);
	cr_expect(!kvs_pull(&pull, &text) && strstr(text.s, "closed") != NULL, "%s", text.s);
	cr_expect(fleet_touched(fleet, 0) == 0 && fleet_touched(fleet, 1) == 0);
	/* The room that is open now was not harmed. */
	cr_expect(fleet_state(fleet, 0, 1, NULL) == KVS_ROOM_OPEN);
	kvs_source_forget(fleet->endpoints[0], 2);
	pull.generation = second;
	cr_expect(kvs_pull(&pull, &text), "%s", text.s);
	pull.generation = 0;
	cr_expect(kvs_pull(&pull, &text), "0 is the current one: %s", text.s);
	/* Opened again while it is open: the earlier use ends. */
	uint64_t third = fleet_open(fleet, 0, 1);
	pull.generation = second;
	cr_expect(third > second && !kvs_pull(&pull, &text));
	fleet_stop(fleet);
}

Test(agent_rooms, items_that_were_not_published, .timeout = 60)
{
	struct fleet *fleet = fleet_start(&small);
	struct kvs_text text = {.s = ""};
	int32_t items[4];
	fleet_fill(fleet);
	uint64_t generation = fleet_open(fleet, 0, 0);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
	memcpy(items, pull.dst_items, sizeof(items));
	items[3] = fleet->dst[small.pages]; /* of room 1 */
	pull.dst_items = items;
	cr_expect(!kvs_pull(&pull, &text) && strstr(text.s, "not among the 4") != NULL, "%s", text.s);
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED && strstr(text.s, "not among the 4") != NULL);
	cr_expect(fleet_touched(fleet, 0) == 0 && fleet_touched(fleet, 1) == 0);
	/* The rest of that request moves nothing, the next request works. */
	pull = fleet_pull(fleet, 1, 0, 0, generation);
	cr_expect(!kvs_pull(&pull, &text));
	cr_expect(kvs_source_failed(fleet->endpoints[1], 1, &text) && strstr(text.s, "not among the 4") != NULL);
	cr_expect(fleet_touched(fleet, 0) == 0);
	fleet_close(fleet, 0, 0, KVS_ROOM_FAILURE);
	cr_expect(fleet_transfer(fleet, 1) && fleet_wrong(fleet, 1) == 0);
	cr_expect(fleet_log_count("room 1 failed: ") == 1);
	/* One warning, at the side that decided. */
	cr_expect(fleet_log_count("1 kvs_flight_ask: room 1: refused") == 1);
	fleet_stop(fleet);
}

Test(agent_rooms, source_items_past_the_end, .timeout = 60)
{
	struct fleet *fleet = fleet_start(&small);
	struct kvs_text text = {.s = ""};
	static const int32_t bad[] = {-1, 17, INT32_MAX};
	fleet_fill(fleet);
	for (uint32_t i = 0; i < 3; i++) {
		int32_t items[4];
		uint64_t generation = fleet_open(fleet, 0, 0);
		struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
		memcpy(items, pull.src_items, sizeof(items));
		items[2] = bad[i];
		pull.src_items = items;
		cr_expect(!kvs_pull(&pull, &text));
		/* The decode hears of it at once. */
		uint64_t began = kvs_now_ns();
		while (fleet_state(fleet, 0, 0, &text) != KVS_ROOM_FAILED && ms_since(began) < 1000)
			usleep(1000);
		cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED);
		kvs_source_forget(fleet->endpoints[0], 1);
	}
	cr_expect(fleet_touched(fleet, 0) == 0);
	fleet_stop(fleet);
}

Test(agent_rooms, lists_of_different_length, .timeout = 60)
{
	struct fleet *fleet = fleet_start(&small);
	struct kvs_text text = {.s = ""};
	fleet_fill(fleet);
	uint64_t generation = fleet_open(fleet, 0, 0);
	for (uint32_t r = 0; r < 2; r++) { /* pages: the common prefix */
		struct kvs_pull pull = fleet_pull(fleet, r, 0, 0, generation);
		pull.dst_count = 3;
		cr_expect(kvs_pull(&pull, &text), "%s", text.s);
	}
	uint64_t page = fleet->decode[0]->components[0].tensors[0].item_len * 4;
	cr_expect(fleet_wrong(fleet, 0) == page, "one page of four tensors is still missing");
	fleet_stop(fleet);
}

Test(agent_rooms, what_may_not_be_opened, .timeout = 60)
{
	struct fleet *fleet = fleet_start_decode(&small);
	struct kvs_layout *layout = fleet->decode[0];
	struct kvs_text text = {.s = ""};
	static const int32_t past[] = {0, 17}, negative[] = {-1};
	struct kvs_item_list list = {.items = past, .count = 2}, two[2] = {{.items = past, .count = 1}};
	uint64_t decode = kvs_endpoint_add(KVS_ROLE_DECODE, layout, "127.0.0.1", &text);
	uint64_t prefill = kvs_endpoint_add(KVS_ROLE_PREFILL, layout, NULL, &text);
	cr_expect(kvs_room_open(decode, 1, &list, 1, &text) == 0 && strstr(text.s, "past the end") != NULL, "%s",
	          text.s);
	list = (struct kvs_item_list){.items = negative, .count = 1};
	cr_expect(kvs_room_open(decode, 1, &list, 1, &text) == 0 && strstr(text.s, "negative") != NULL, "%s", text.s);
	cr_expect(kvs_room_open(decode, 1, two, 2, &text) == 0 && strstr(text.s, "2 components") != NULL, "%s", text.s);
	cr_expect(kvs_room_open(prefill, 1, two, 1, &text) == 0);
	cr_expect(kvs_room_open(4711, 1, two, 1, &text) == 0);
	cr_expect(kvs_room_state(decode, 1, &text) == KVS_ROOM_UNKNOWN);
	cr_expect(kvs_room_open(decode, 1, two, 1, &text) > 0 && kvs_room_open(decode, 2, NULL, 0, &text) > 0);
	kvs_room_close(decode, 77, KVS_ROOM_SUCCESS);
	/* Memory at a null address, and a layout that makes no sense. */
	uint64_t address = layout->components[0].tensors[0].address;
	layout->components[0].tensors[0].address = 0;
	cr_expect(kvs_endpoint_add(KVS_ROLE_DECODE, layout, NULL, &text) == 0 && strstr(text.s, "null") != NULL);
	layout->components[0].tensors[0].address = UINT64_MAX - 5;
	cr_expect(kvs_endpoint_add(KVS_ROLE_DECODE, layout, NULL, &text) == 0);
	layout->components[0].tensors[0].address = address;
	kvs_endpoint_remove(prefill);
	kvs_endpoint_remove(decode);
	kvs_endpoint_remove(decode);
	fleet_stop(fleet);
}

/* Trial A7: the decode gives the pages of an aborted room away at once. */
Test(agent_rooms, nothing_lands_after_a_close, .timeout = 60)
{
	struct fleet *fleet = start_with_fault(&big, fault_slow, FAULT_ORDER);
	struct kvs_text text = {.s = ""};
	uint64_t generation = fleet_open(fleet, 0, 0);
	uint64_t page = fleet->decode[0]->components[0].tensors[0].item_len;
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
	struct fleet_job job;
	fleet_begin(&job, &pull);
	/* About a third of it. */
	while (!fleet_reached(fleet, 0, 30))
		usleep(1000);
	cr_expect(!atomic_load(&job.done));
	uint64_t began = kvs_now_ns();
	fleet_close(fleet, 0, 0, KVS_ROOM_FAILURE);
	cr_expect(ms_since(began) < 500, "%llu ms", (unsigned long long)ms_since(began));
	/* Another room has the pages now, and its own bytes in them. */
	uint64_t other = fleet_open_as(fleet, 0, 1, 0);
	for (uint32_t t = 0; t < 4; t++) {
		for (uint32_t i = 0; i < big.pages; i++)
			memset((char *)(uintptr_t)fleet->decode[0]->components[0].tensors[t].address +
			               (uint64_t)fleet->dst[i] * page,
			       FLEET_CANARY, page);
	}
	cr_expect(!fleet_end(&job) && strstr(job.text.s, "closed") != NULL, "%s", job.text.s);
	usleep(200000);
	cr_expect(fleet_touched(fleet, 0) == 0, "%llu bytes of the aborted room landed",
	          (unsigned long long)fleet_touched(fleet, 0));
	/* What is left of it in the staging memory does not disturb the next one. */
	for (uint32_t r = 0; r < 2; r++) {
		pull = fleet_pull(fleet, r, 0, 0, other);
		pull.room = 2;
		cr_expect(kvs_pull(&pull, &text), "%s", text.s);
	}
	cr_expect(fleet_wrong(fleet, 0) == 0);
	fleet_stop(fleet);
}

Test(agent_rooms, cancel_ends_a_pull, .timeout = 60)
{
	struct fleet *fleet = start_with_fault(&big, fault_slow, FAULT_ORDER);
	struct kvs_text text = {.s = ""};
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, fleet_open(fleet, 0, 0));
	struct fleet_job job;
	fleet_begin(&job, &pull);
	while (!fleet_reached(fleet, 0, 0))
		usleep(1000);
	uint64_t began = kvs_now_ns();
	kvs_source_cancel(fleet->endpoints[0], 1);
	cr_expect(!fleet_end(&job) && strstr(job.text.s, "cancelled") != NULL, "%s", job.text.s);
	cr_expect(ms_since(began) < 500, "%llu ms", (unsigned long long)ms_since(began));
	cr_expect(!kvs_pull(&pull, &text) && strstr(text.s, "cancelled") != NULL, "later calls too: %s", text.s);
	cr_expect(kvs_source_failed(fleet->endpoints[0], 1, &text));
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED && strstr(text.s, "cancelled") != NULL, "%s",
	          text.s);
	/* Nothing of this call is written any more. */
	uint64_t touched = fleet_touched(fleet, 0);
	usleep(100000);
	cr_expect(fleet_touched(fleet, 0) == touched);
	/* The number may be used again. */
	fleet_close(fleet, 0, 0, KVS_ROOM_FAILURE);
	kvs_source_forget(fleet->endpoints[0], 1);
	cr_expect(!kvs_source_failed(fleet->endpoints[0], 1, &text));
	cr_expect(fleet_transfer(fleet, 0) && fleet_wrong(fleet, 0) == 0);
	fleet_stop(fleet);
}

Test(agent_rooms, a_failure_is_told, .timeout = 60)
{
	struct fleet *fleet = fleet_start(&small);
	struct kvs_text text = {.s = ""};
	uint64_t generation = fleet_open(fleet, 0, 0), began = kvs_now_ns();
	kvs_source_fail(fleet->endpoints[0], fleet->peers[0], 1, generation, "the first reason");
	kvs_source_fail(fleet->endpoints[0], fleet->peers[0], 1, generation, "the second reason");
	while (fleet_state(fleet, 0, 0, &text) != KVS_ROOM_FAILED && ms_since(began) < 1000)
		usleep(1000);
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED && strstr(text.s, "first reason") != NULL, "%s",
	          text.s);
	cr_expect(kvs_source_failed(fleet->endpoints[0], 1, &text));
	cr_expect_str_eq(text.s, "the first reason");
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
	cr_expect(!kvs_pull(&pull, &text));
	cr_expect_str_eq(text.s, "the first reason");
	/* A failure of an earlier use of the number does not concern the present one. */
	uint64_t later = fleet_open(fleet, 0, 0);
	kvs_source_fail(fleet->endpoints[1], fleet->peers[0], 1, generation, "old news");
	usleep(50000);
	cr_expect(later > generation && fleet_state(fleet, 0, 0, NULL) == KVS_ROOM_OPEN);
	fleet_stop(fleet);
}

static void hands_over(void (*fault)(void), const char *reason, const char *line)
{
	struct fleet *fleet = start_with_fault(&big, fault, FAULT_ORDER);
	cr_expect(fleet_transfer(fleet, 0) && fleet_wrong(fleet, 0) == 0);
	cr_expect(fleet_log_count(reason) >= 1);
	cr_expect(fleet_log_count(line) == 1);
	/* The next one starts with what worked. */
	fleet_log_clear();
	cr_expect(fleet_transfer(fleet, 1) && fleet_wrong(fleet, 1) == 0);
	cr_expect(fleet_log_count("going on with") == 0);
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}

Test(agent_rooms, hand_over_from_the_decode, .timeout = 60)
{
	hands_over(fault_pull, "rdma failed (injected at the decode), going on with host", "done: route=host");
}

Test(agent_rooms, hand_over_from_the_prefill, .timeout = 60)
{
	hands_over(fault_send, "rdma failed (injected at the prefill), going on with host", "done: route=host");
}

Test(agent_rooms, hand_over_twice, .timeout = 60)
{
	hands_over(fault_all, "host failed (injected at the prefill), going on with tcp", "done: route=tcp");
}

Test(agent_rooms, no_transport_left, .timeout = 60)
{
	struct fleet *fleet = start_with_fault(&big, fault_all, "rdma,host");
	struct kvs_text text = {.s = ""};
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, fleet_open(fleet, 0, 0));
	cr_expect(!kvs_pull(&pull, &text) && strstr(text.s, "no transport is left") != NULL, "%s", text.s);
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED && strstr(text.s, "no transport is left") != NULL);
	fleet_stop(fleet);
}

Test(agent_rooms, senseless_shared_memory, .timeout = 60)
{
	struct fleet *fleet = start_with_fault(&big, fault_insane, FAULT_ORDER);
	struct kvs_text text = {.s = ""};
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, fleet_open(fleet, 0, 0));
	cr_expect(!kvs_pull(&pull, &text));
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED && strstr(text.s, "makes no sense") != NULL, "%s",
	          text.s);
	cr_expect(fleet_touched(fleet, 0) == 0 && fleet_touched(fleet, 1) == 0 && fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}

Test(agent_rooms, timeout, .timeout = 60)
{
	fleet_prefill_config.timeout_ms = 500;
	struct fleet *fleet = start_with_fault(&small, fault_silent, FAULT_ORDER);
	struct kvs_text text = {.s = ""};
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, fleet_open(fleet, 0, 0));
	struct fleet_job job;
	fleet_begin(&job, &pull);
	cr_expect(!fleet_end(&job));
	cr_expect(job.ended_ns - job.began_ns < 1500000000u && strstr(job.text.s, "500 ms") != NULL, "%s", job.text.s);
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED && strstr(text.s, "500 ms") != NULL, "%s", text.s);
	cr_expect(fleet_touched(fleet, 0) == 0);
	fleet_stop(fleet);
}

Test(agent_rooms, the_decode_dies, .timeout = 60)
{
	struct fleet *fleet = start_with_fault(&big, fault_slow, FAULT_ORDER);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, fleet_open(fleet, 0, 0));
	struct fleet_job job;
	int status;
	fleet_begin(&job, &pull);
	while (!fleet_reached(fleet, 0, 0))
		usleep(1000);
	uint64_t began = kvs_now_ns();
	kill(fleet->child, SIGKILL);
	cr_expect(!fleet_end(&job) && strstr(job.text.s, "lost") != NULL, "%s", job.text.s);
	cr_expect(ms_since(began) < 1000);
	waitpid(fleet->child, &status, 0);
	fleet->child = 0;
	/* The next request finds nobody there, at once. */
	struct kvs_text text = {.s = ""};
	struct kvs_verdict verdict;
	began = kvs_now_ns();
	pull.room = 2;
	cr_expect(!kvs_pull(&pull, &text) && strstr(text.s, "cannot be reached") != NULL, "%s", text.s);
	kvs_peer_verdict(pull.endpoint, pull.peer, 0, &verdict);
	cr_expect(verdict.action == KVS_ACT_REFUSE && verdict.refusal == KVS_REFUSE_NONE);
	cr_expect(ms_since(began) < 1000);
	fleet_stop(fleet);
}

Test(agent_rooms, the_prefill_dies, .timeout = 60)
{
	fleet_child_setup = fault_slow;
	fault_slow();
	fleet_prefill_config.transports = fleet_decode_config.transports = FAULT_ORDER;
	struct fleet *fleet = fleet_start_decode(&big);
	struct kvs_text text = {.s = ""};
	int status;
	fleet_fill(fleet);
	uint64_t generation = fleet_open(fleet, 0, 0);
	pid_t prefill = fork();
	if (prefill == 0) {
		fleet_join(fleet);
		struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
		(void)kvs_pull(&pull, &text);
		_exit(0);
	}
	while (!fleet_reached(fleet, 0, 0))
		usleep(1000);
	kill(prefill, SIGKILL);
	waitpid(prefill, &status, 0);
	uint64_t began = kvs_now_ns();
	while (fleet_state(fleet, 0, 0, &text) != KVS_ROOM_FAILED && ms_since(began) < 1000)
		usleep(1000);
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED && strstr(text.s, "went away") != NULL, "%s",
	          text.s);
	/* A new prefill is served. */
	fleet_join(fleet);
	cr_expect(fleet_transfer(fleet, 1) && fleet_wrong(fleet, 1) == 0);
	fleet_stop(fleet);
}

Test(agent_rooms, pulls_of_one_link_queue, .timeout = 60)
{
	struct fleet_shape shape = {2, 1, 8, 2, 64, 16, 12, 128, 128};
	struct fleet *fleet = fleet_start(&shape);
	struct fleet_job jobs[24];
	fleet_fill(fleet);
	for (uint32_t i = 0; i < 24; i++) {
		uint64_t generation = i % 2 == 0 ? fleet_open(fleet, 0, i / 2) : 0;
		struct kvs_pull pull = fleet_pull(fleet, i % 2, 0, i / 2, generation);
		fleet_begin(&jobs[i], &pull);
	}
	for (uint32_t i = 0; i < 24; i++)
		cr_expect(fleet_end(&jobs[i]), "%s", jobs[i].text.s);
	for (uint32_t room = 0; room < 12; room++) {
		cr_expect(fleet_wrong(fleet, room) == 0);
		fleet_close(fleet, 0, room, KVS_ROOM_SUCCESS);
	}
	cr_expect(fleet_strayed(fleet) == 0);
	cr_expect(fleet_log_count("prefill_ranks=2") == 12);
	fleet_stop(fleet);
}
