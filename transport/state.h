/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent's state: one object, one lock. Everything here is read and written with the lock held, but for what a field
 * says. Copying is done without it, so it is only ever held for bookkeeping. One lock is also what makes a fork simple.
 */
#ifndef KVS_TRANSPORT_STATE_H
#define KVS_TRANSPORT_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "agent.h"
#include "clock.h"
#include "conn.h"
#include "record.h"
#include "stats.h"
#include "transport.h"

#define KVS_SECRET_MAX       4096
#define KVS_RDMA_CHOICE_SIZE 80

struct kvs_link;
struct kvs_room;
struct kvs_source;

/* A copy of kvs_agent_config that owns its strings, parsed. */
struct kvs_config {
	uint32_t timeout_ms;
	uint64_t staging_bytes;
	uint32_t order[KVS_TRANSPORT_COUNT];
	uint32_t order_count;
	char *listen;
	char *stats_path;
	bool splice_equal_tp;
	bool verify;
	char rdma_device[KVS_RDMA_CHOICE_SIZE];
	int rdma_gid; /* as in kvs_agent_config */
	uint8_t rdma_service_level;
	uint8_t rdma_traffic_class;
	uint8_t cuda_copy;
	bool has_secret;
	uint8_t secret[KVS_SECRET_MAX];
	size_t secret_size;
};

struct kvs_endpoint {
	struct kvs_endpoint *next;
	uint64_t id;
	enum kvs_role role;
	uint32_t refs;
	uint32_t workers; /* inside kvs_pull: they read the registered memory */
	bool removed;
	bool device_memory;
	struct kvs_cuda_memory *cuda; /* cuda_memory.h; NULL: host memory */
	struct kvs_layout *layout;    /* constant */
	struct kvs_record record;     /* decode */
	char *host;
};

struct kvs_peer {
	struct kvs_peer *next;
	uint64_t id;
	uint32_t refs; /* kvs_peer_add calls and links */
	bool removed;  /* kvs_peer_remove was called as often as kvs_peer_add */
	uint32_t added;
	struct kvs_record record;
	struct kvs_identity identity;
	char name[128];
};

#define KVS_TABLE_SIZE 1024 /* chains of rooms and sources; a power of two */

struct kvs_state {
	pthread_mutex_t lock;
	pthread_cond_t changed; /* link states, rooms that are no longer busy, endpoints without workers or links */
	struct kvs_config config;
	bool configured;
	uint64_t last_id; /* endpoints, peers, links, requests and generations share the numbers */
	struct kvs_endpoint *endpoints;
	struct kvs_peer *peers;
	struct kvs_link *links;
	struct kvs_room *rooms[KVS_TABLE_SIZE];
	struct kvs_source *sources[KVS_TABLE_SIZE];
	struct kvs_stats stats;

	bool running;
	bool stopping;
	pthread_t thread;
	int epoll; /* -1 when not running */
	int wake;  /* eventfd: look at the state again */
	int listen_unix;
	int listen_tcp;
	struct kvs_identity self;
	uint8_t key[KVS_KEY_SIZE];
	char unix_name[KVS_UNIX_SIZE];
	struct kvs_record tcp; /* only the tcp_* fields */
};

extern struct kvs_state kvs_state;

void kvs_lock(void);
void kvs_unlock(void);

/* Wait on a condition with the lock held, until this time at most. False: the time is over. */
bool kvs_wait_until(pthread_cond_t *cond, uint64_t deadline_ns);

/* Chain of a (endpoint, room) pair. */
uint32_t kvs_table_slot(uint64_t endpoint, uint64_t room);

/* Make the agent thread look at the state. */
void kvs_agent_wake(void);

/* The configuration in force: kvs_agent_configure's, or the defaults. The lock held. */
const struct kvs_config *kvs_config_get(void);

struct kvs_endpoint *kvs_endpoint_find(uint64_t id); /* NULL: unknown or removed */
void kvs_endpoint_unref(struct kvs_endpoint *endpoint);
struct kvs_peer *kvs_peer_find(uint64_t id);
void kvs_peer_unref(struct kvs_peer *peer);

/* Start the thread and, for a decode, the listening sockets. The lock held. False with text. */
bool kvs_agent_start(enum kvs_role role, const char *host, struct kvs_text *text);

/* The last endpoint is gone: end the thread and close everything. Takes the lock itself. */
void kvs_agent_stop(void);

#endif
