/* SPDX-License-Identifier: Apache-2.0 */
/* The decode's ranks in this process and the prefill's in another, connected: whole transfers over the agents. */
#ifndef KVS_TEST_CUDA_WORLD_H
#define KVS_TEST_CUDA_WORLD_H

#include "peer.h"

#define WORLD_RANKS 8

struct setting {
	struct shape shape;
	uint32_t p_size, d_size;
	enum kvs_cuda_kind p_kind, d_kind;
	uint32_t parts;
	int p_device, d_device;
	const char *transports;
	const char *environment; /* of the prefill */
	uint32_t timeout_ms;
	bool verify; /* both sides */
	bool apart;  /* each side is process 1 of a pid namespace of its own */
};

struct world {
	const struct driver *driver;
	struct setting setting;
	struct peer peer;
	struct rank ranks[WORLD_RANKS];
	uint64_t endpoints[WORLD_RANKS];
	uint64_t peers[WORLD_RANKS]; /* the prefill's ids of our ranks */
	char log[16384];             /* of this process, lines of level warn and info */
};

void world_new(struct world *world, const struct setting *setting);
void world_free(struct world *world);

/* What of ours is still open here, in words; empty: nothing. Only with the double. */
void world_check_empty(const struct world *world);

struct room {
	uint64_t number, generation;
	uint32_t d;
	int32_t src[PEER_ITEMS], dst[PEER_ITEMS];
	uint32_t counts[COMPONENTS];
};

/* Open a room on a decode rank for so many items, in an order that mixes. */
struct room room_new(struct world *world, uint64_t number, uint32_t d, uint32_t count);
struct message room_pull(const struct world *world, const struct room *room, uint32_t r, uint32_t component);
/* Pull everything. The first answer that is not ok, or ok. */
struct answer room_run(struct world *world, const struct room *room);
uint64_t room_verify(const struct world *world, const struct room *room, bool moved);
void room_end(const struct world *world, const struct room *room, bool ok);

struct answer world_do(struct world *world, enum order order, uint32_t rank, const char *text);

#endif
