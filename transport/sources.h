/* SPDX-License-Identifier: Apache-2.0 */
/* The prefill's rooms: cancelled or failed, and why. One that is neither has no entry. The lock held. */
#ifndef KVS_TRANSPORT_SOURCES_H
#define KVS_TRANSPORT_SOURCES_H

#include "state.h"

struct kvs_source {
	struct kvs_source *next; /* chain */
	uint64_t endpoint;
	uint64_t room;
	bool cancelled;
	bool failed;
	struct kvs_text text; /* the first reason */
};

/* NULL: nothing is known about it. */
struct kvs_source *kvs_sources_find(uint64_t endpoint, uint64_t room);

/* Found, or made; NULL: out of memory. */
struct kvs_source *kvs_sources_get(uint64_t endpoint, uint64_t room);

/* Note the first failure. True: this was it. */
bool kvs_sources_fail(uint64_t endpoint, uint64_t room, const char *text);

/* Cancelled or failed? text_p gets the reason. */
bool kvs_sources_ended(uint64_t endpoint, uint64_t room, struct kvs_text *text_p);

void kvs_sources_forget(uint64_t endpoint, uint64_t room);
void kvs_sources_forget_all(uint64_t endpoint);

#endif
