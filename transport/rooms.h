/* SPDX-License-Identifier: Apache-2.0 */
/* The decode's rooms: what a receiver published, whether it may still be written, and what was moved. The lock held. */
#ifndef KVS_TRANSPORT_ROOMS_H
#define KVS_TRANSPORT_ROOMS_H

#include "itemset.h"
#include "state.h"

struct kvs_room {
	struct kvs_room *next; /* chain */
	uint64_t endpoint;
	uint64_t number;
	uint64_t generation;
	bool failed;
	bool closing;  /* no new piece may begin */
	uint32_t busy; /* pieces being written now */
	struct kvs_text text;
	uint32_t set_count;
	struct kvs_itemset *sets; /* by component */
	uint64_t memory_epoch;    /* of the endpoint's device memory when it was opened */

	/* For the report. */
	uint32_t transports;    /* mask of those that moved bytes */
	uint32_t components;    /* mask of those that bytes were moved for */
	uint64_t prefill_ranks; /* mask of the ranks modulo 64 */
	uint64_t bytes, runs, pulls, plan_ns, copy_ns;
	uint64_t opened_ns, first_ns, last_ns;
};

/* NULL: no such room, or (generation not 0) not of this generation, or being closed. */
struct kvs_room *kvs_rooms_find(uint64_t endpoint, uint64_t number, uint64_t generation);

/* Note the first failure. */
void kvs_room_fail(struct kvs_room *room, const char *text);

/* May these be written for component? False with text. */
bool kvs_room_allows(const struct kvs_room *room, uint32_t component, const int32_t *items, uint32_t count,
                     struct kvs_text *text);

/* Close all rooms of an endpoint; waits with the lock released. */
void kvs_rooms_close_all(uint64_t endpoint);

/* How many there are. */
uint32_t kvs_rooms_count(void);

#endif
