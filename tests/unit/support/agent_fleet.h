/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prefill and decode ranks with real agents: the decode ranks in a child process, the prefill ranks in the test's own.
 * All KV memory is shared between the two, so that the test fills and checks every byte itself.
 */
#ifndef KVS_TEST_AGENT_FLEET_H
#define KVS_TEST_AGENT_FLEET_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "transport/agent.h"

#define FLEET_RANKS  16
#define FLEET_CANARY 0xa5

struct fleet_shape {
	uint32_t prefill_tp, decode_tp;
	uint32_t heads, layers, page_size;
	uint32_t pages; /* of a room */
	uint32_t rooms; /* that there is memory for */
	uint32_t k_width, v_width;
};

struct fleet {
	struct fleet_shape shape;
	struct kvs_layout *prefill[FLEET_RANKS], *decode[FLEET_RANKS];
	int32_t *src, *dst; /* items of room k: src + k * pages; the same for each rank */
	uint32_t items;
	uint64_t endpoints[FLEET_RANKS]; /* prefill */
	uint64_t peers[FLEET_RANKS];     /* decode ranks, as the prefill knows them */
	uint8_t records[FLEET_RANKS][KVS_RECORD_MAX];
	size_t record_sizes[FLEET_RANKS];
	pid_t child;
	int control; /* socket to the child */
};

/* Defaults that tests change. */
extern struct kvs_agent_config fleet_prefill_config, fleet_decode_config;
/* In the child before its agent starts, when set: to plug in other transports. */
extern void (*fleet_child_setup)(void);

/* Where a rank's memory comes from and goes to, when set: shared by both processes, and the CPU may use it. */
extern void *(*fleet_allocate)(size_t size);
extern void (*fleet_release)(void *memory);

/* Memory, layouts, the decode's process with its endpoints, the prefill's endpoints and peers. */
struct fleet *fleet_start(const struct fleet_shape *shape);
/* Fails the test when a process does not end well. */
void fleet_stop(struct fleet *fleet);

/* Only memory and the decode's process: the test makes the prefill's side itself with fleet_join. */
struct fleet *fleet_start_decode(const struct fleet_shape *shape);
void fleet_join(struct fleet *fleet);

/* Sources of a room get their values, all decode memory the canary. */
void fleet_fill(struct fleet *fleet);
/* Bytes of a room that are not what they must be. */
uint64_t fleet_wrong(const struct fleet *fleet, uint32_t room);
/* Bytes of a room that are no longer canary. */
uint64_t fleet_touched(const struct fleet *fleet, uint32_t room);
/* Has the transfer of a room from prefill rank 0 come so far? Looks at one word. */
bool fleet_reached(const struct fleet *fleet, uint32_t room, uint32_t percent);
/* Bytes outside of all rooms that are no longer canary. */
uint64_t fleet_strayed(const struct fleet *fleet);

/* At the decode's process. */
uint64_t fleet_open(struct fleet *fleet, uint32_t rank, uint32_t room);
/* The room, with the items of another one. */
uint64_t fleet_open_as(struct fleet *fleet, uint32_t rank, uint32_t room, uint32_t items_of);
void fleet_close(struct fleet *fleet, uint32_t rank, uint32_t room, enum kvs_room_end end);
enum kvs_room_state fleet_state(struct fleet *fleet, uint32_t rank, uint32_t room, struct kvs_text *text);
/* CPU time that the decode's process has used, microseconds. */
uint64_t fleet_decode_cpu_us(struct fleet *fleet);

/* The pull of a room between two ranks, ready to be changed or called. */
struct kvs_pull fleet_pull(const struct fleet *fleet, uint32_t prefill_rank, uint32_t decode_rank, uint32_t room,
                           uint64_t generation);
/* The first decode rank that a prefill rank serves, and how many. */
uint32_t fleet_first_target(const struct fleet *fleet, uint32_t prefill_rank, uint32_t *count_p);

/* Call kvs_pull in a thread of its own. */
struct fleet_job {
	pthread_t thread;
	struct kvs_pull pull;
	bool ok;
	struct kvs_text text;
	uint64_t began_ns, ended_ns;
	atomic_bool done;
};
void fleet_begin(struct fleet_job *job, const struct kvs_pull *pull);
bool fleet_end(struct fleet_job *job);

/* A thread's main function, with the fleet: pull room 0 between the first two ranks until fleet_load_ends. Returns how
 * many went well. */
extern atomic_bool fleet_load_ends;
void *fleet_load(void *fleet);

/* Open a room on every decode rank, pull it from every prefill rank one after the other, close it. True: all went. */
bool fleet_transfer(struct fleet *fleet, uint32_t room);

/* Log lines of both processes that contain the text. */
uint32_t fleet_log_count(const char *text);
void fleet_log_clear(void);

#endif
