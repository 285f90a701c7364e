/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What staging rings elsewhere got wrong, played to ours: chunks in any order and of any split, failed rooms that keep
 * their space, a ring that is half free and admits nothing, a peer that is stuck or dead, more rooms than space.
 */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/agent_faults.h"
#include "support/agent_fleet.h"
#include "transport/staging.h"

#define LEAST 1 /* bytes: the ring is as small as it can be, two slots */
#define JOBS  64

/* 1 MiB of each room between a pair: many times what the smallest ring holds. */
static const struct fleet_shape shape = {4, 2, 8, 2, 64, 16, 16, 128, 128};

/* A part of a room's pages, as one call. */
static struct kvs_pull part(const struct fleet *fleet, uint32_t p, uint32_t d, uint32_t room, uint64_t generation,
                            uint32_t chunk, uint32_t first, uint32_t count)
{
	struct kvs_pull pull = fleet_pull(fleet, p, d, room, generation);
	pull.chunk = chunk;
	pull.src_items += first;
	pull.dst_items += first;
	pull.src_count = pull.dst_count = count;
	return pull;
}

static struct fleet *start(uint64_t staging_bytes)
{
	fleet_prefill_config.staging_bytes = fleet_decode_config.staging_bytes = staging_bytes;
	fleet_prefill_config.transports = fleet_decode_config.transports = "host";
	struct fleet *fleet = fleet_start(&shape);
	fleet_fill(fleet);
	return fleet;
}

/* Splits of a prompt: even, after a prefix hit that leaves an odd rest, and one page at a time. */
static const uint32_t splits[][17] = {{8, 8}, {4, 11, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}};

/*
 * Where a chunk's bytes go is in its pages, not in its number: any split, the last chunk's call begun first and the
 * others while it runs, on every pair of ranks at once.
 */
Test(agent_staging, chunks_in_any_order, .timeout = 60)
{
	struct fleet *fleet = start(LEAST);
	for (uint32_t room = 0; room < 3; room++) {
		static struct fleet_job jobs[JOBS];
		uint64_t generations[2] = {fleet_open(fleet, 0, room), fleet_open(fleet, 1, room)};
		uint32_t count = 0;
		for (uint32_t p = 0; p < shape.prefill_tp; p++) {
			uint32_t chunks = 0, end = shape.pages;
			while (chunks < 16 && splits[room][chunks] > 0)
				chunks++;
			for (uint32_t c = chunks; c-- > 0;) {
				end -= splits[room][c];
				struct kvs_pull pull =
				        part(fleet, p, p / 2, room, generations[p / 2], c, end, splits[room][c]);
				fleet_begin(&jobs[count++], &pull);
			}
		}
		for (uint32_t i = 0; i < count; i++)
			cr_expect(fleet_end(&jobs[i]), "room %u: %s", room, jobs[i].text.s);
		cr_expect(fleet_wrong(fleet, room) == 0, "room %u", room);
		fleet_close(fleet, 0, room, KVS_ROOM_SUCCESS);
		fleet_close(fleet, 1, room, KVS_ROOM_SUCCESS);
	}
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}

/* The slow transport over the smallest ring. */
static void slow_and_small(void)
{
	fleet_child_setup = fault_slow;
	fault_slow();
	fleet_prefill_config.transports = fleet_decode_config.transports = FAULT_ORDER;
	fleet_prefill_config.staging_bytes = fleet_decode_config.staging_bytes = LEAST;
}

/* Room 0 is pulled by a prefill's process of its own, which is stopped in mid-transfer. */
static pid_t stop_prefill(struct fleet *fleet)
{
	struct kvs_text text;
	uint64_t generation = fleet_open(fleet, 0, 0);
	pid_t stuck = fork();
	cr_assert(stuck >= 0);
	if (stuck == 0) {
		fleet_join(fleet);
		struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
		(void)kvs_pull(&pull, &text);
		_exit(0);
	}
	while (!fleet_reached(fleet, 0, 0))
		usleep(200);
	kill(stuck, SIGSTOP);
	return stuck;
}

/* Rooms that fail with the ring full of their bytes leave nothing behind that takes space from the next. */
Test(agent_staging, failed_rooms_free_their_space, .timeout = 60)
{
	slow_and_small();
	struct fleet *fleet = fleet_start(&shape);
	fleet_fill(fleet);
	for (uint32_t i = 0; i < 12; i++) {
		struct fleet_job job;
		struct kvs_pull pull = fleet_pull(fleet, 0, 0, i, fleet_open(fleet, 0, i));
		fleet_begin(&job, &pull);
		while (!fleet_reached(fleet, i, 0) && !job.done)
			usleep(200);
		if (i % 2 == 0)
			kvs_source_cancel(fleet->endpoints[0], i + 1);
		else
			fleet_close(fleet, 0, i, KVS_ROOM_FAILURE);
		cr_expect(!fleet_end(&job), "room %u was over before it could fail", i);
		fleet_close(fleet, 0, i, KVS_ROOM_FAILURE);
	}
	for (uint32_t room = 12; room < 15; room++)
		cr_expect(fleet_transfer(fleet, room) && fleet_wrong(fleet, room) == 0, "room %u", room);
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}

/* A ring with 60 of each 100 filled and emptied again has room for 70 of 100, wherever it stands. */
Test(agent_staging, an_empty_ring_takes_all)
{
	struct kvs_staging consumer, producer;
	struct kvs_text text = {.s = ""};
	uint8_t *slot;
	const uint8_t *full;
	uint64_t stream;
	uint32_t length;
	cr_assert(kvs_staging_create(&consumer, UINT64_MAX, &text), "%s", text.s);
	int fds[3] = {dup(consumer.memory), dup(consumer.data), dup(consumer.space)};
	cr_assert(kvs_staging_map(&producer, fds, consumer.slot_count, consumer.slot_size, &text), "%s", text.s);
	uint32_t slots = consumer.slot_count, first = slots * 60 / 100, second = slots * 70 / 100;
	cr_assert(first > 0 && second > slots - first, "a ring of %u slots shows nothing", slots);
	for (uint32_t round = 0; round < 3 * slots; round++) {
		for (uint32_t half = 0; half < 2; half++) {
			uint32_t count = half == 0 ? first : second;
			for (uint32_t i = 0; i < count; i++) {
				cr_assert(kvs_staging_empty(&producer, &slot) == KVS_SLOT_READY, "%u of %u", i, count);
				kvs_staging_commit(&producer, round, 1);
			}
			for (uint32_t i = 0; i < count; i++) {
				cr_assert(kvs_staging_filled(&consumer, &full, &stream, &length) == KVS_SLOT_READY);
				kvs_staging_release(&consumer);
			}
		}
	}
	kvs_staging_drop(&consumer);
	kvs_staging_drop(&producer);
}

/* More rooms at once than the smallest rings hold a slot for: all end. */
Test(agent_staging, more_rooms_than_space, .timeout = 120)
{
	static struct fleet_job jobs[16 * 4];
	struct fleet *fleet = start(LEAST);
	uint32_t count = 0;
	for (uint32_t room = 0; room < shape.rooms; room++) {
		for (uint32_t d = 0; d < 2; d++) {
			uint64_t generation = fleet_open(fleet, d, room);
			for (uint32_t p = 2 * d; p < 2 * d + 2; p++) {
				struct kvs_pull pull = fleet_pull(fleet, p, d, room, generation);
				fleet_begin(&jobs[count++], &pull);
			}
		}
	}
	for (uint32_t i = 0; i < count; i++)
		cr_expect(fleet_end(&jobs[i]), "%s", jobs[i].text.s);
	for (uint32_t room = 0; room < shape.rooms; room++) {
		cr_expect(fleet_wrong(fleet, room) == 0, "room %u", room);
		fleet_close(fleet, 0, room, KVS_ROOM_SUCCESS);
		fleet_close(fleet, 1, room, KVS_ROOM_SUCCESS);
	}
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}

/* What one peer has waiting does not hold up another: its one room is served in turns with the other's eight. */
Test(agent_staging, peers_take_turns, .timeout = 60)
{
	enum { CROWD = 8 };
	static struct fleet_job crowd[CROWD], one;
	uint64_t generations[CROWD + 1];
	slow_and_small();
	struct fleet *fleet = fleet_start(&shape);
	fleet_fill(fleet);
	for (uint32_t room = 0; room <= CROWD; room++)
		generations[room] = fleet_open(fleet, 0, room);
	for (uint32_t room = 0; room < CROWD; room++) {
		struct kvs_pull pull = fleet_pull(fleet, 0, 0, room, generations[room]);
		fleet_begin(&crowd[room], &pull);
	}
	/* Whichever of them comes first. */
	for (uint32_t room = 0; !fleet_reached(fleet, room, 0); room = (room + 1) % CROWD)
		usleep(20);
	struct kvs_pull pull = fleet_pull(fleet, 1, 0, CROWD, generations[CROWD]);
	fleet_begin(&one, &pull);
	cr_expect(fleet_end(&one), "%s", one.text.s);
	uint32_t before = 0;
	for (uint32_t room = 0; room < CROWD; room++)
		before += atomic_load(&crowd[room].done);
	/* In turns it is one, the one that had begun, or two. */
	cr_expect(before <= 3, "%u of the %d rooms of one peer ended before the other's one", before, CROWD);
	for (uint32_t room = 0; room < CROWD; room++)
		cr_expect(fleet_end(&crowd[room]), "%s", crowd[room].text.s);
	for (uint32_t room = 0; room <= CROWD; room++)
		fleet_close(fleet, 0, room, KVS_ROOM_SUCCESS);
	cr_expect(fleet_transfer(fleet, CROWD + 1) && fleet_wrong(fleet, CROWD + 1) == 0);
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}

/* A prefill's process in a room of its own, stopped or ended in mid-transfer: the other's rooms go on beside it. */
Test(agent_staging, one_peer_stuck_then_dead, .timeout = 60)
{
	slow_and_small();
	struct fleet *fleet = fleet_start_decode(&shape);
	struct kvs_text text = {.s = ""};
	fleet_fill(fleet);
	pid_t stuck = stop_prefill(fleet);
	fleet_join(fleet);
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_OPEN, "%s", text.s);
	for (uint32_t room = 1; room < 4; room++)
		cr_expect(fleet_transfer(fleet, room) && fleet_wrong(fleet, room) == 0, "room %u", room);
	kill(stuck, SIGKILL);
	waitpid(stuck, NULL, 0);
	for (int i = 0; i < 1000 && fleet_state(fleet, 0, 0, &text) != KVS_ROOM_FAILED; i++)
		usleep(1000);
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED && strstr(text.s, "went away") != NULL, "%s",
	          text.s);
	fleet_close(fleet, 0, 0, KVS_ROOM_FAILURE);
	cr_expect(fleet_transfer(fleet, 4) && fleet_wrong(fleet, 4) == 0 && fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}

/* A prefill that stays connected and sends nothing more: its room fails in time, and nothing of it lands afterwards. */
Test(agent_staging, one_peer_stopped, .timeout = 60)
{
	slow_and_small();
	fleet_decode_config.timeout_ms = 400;
	struct fleet *fleet = fleet_start_decode(&shape);
	struct kvs_text text = {.s = ""};
	fleet_fill(fleet);
	pid_t stuck = stop_prefill(fleet);
	for (int i = 0; i < 5000 && fleet_state(fleet, 0, 0, &text) == KVS_ROOM_OPEN; i++)
		usleep(1000);
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED &&
	                  strstr(text.s, "within 400 ms (KVSPLICE_TIMEOUT_MS)") != NULL,
	          "%s", text.s);
	fleet_close(fleet, 0, 0, KVS_ROOM_FAILURE);
	uint64_t touched = fleet_touched(fleet, 0);
	kill(stuck, SIGCONT);
	waitpid(stuck, NULL, 0);
	cr_expect(fleet_touched(fleet, 0) == touched, "something landed after the room was closed");
	fleet_join(fleet);
	cr_expect(fleet_transfer(fleet, 1) && fleet_wrong(fleet, 1) == 0 && fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}
