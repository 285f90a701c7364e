/* SPDX-License-Identifier: Apache-2.0 */
/* Counters of this process, and their file in the Prometheus text format. The lock held where not said otherwise. */
#ifndef KVS_TRANSPORT_STATS_H
#define KVS_TRANSPORT_STATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../policy/verdict.h"
#include "transport.h"

struct kvs_stats {
	uint64_t rooms_opened, rooms_done, rooms_failed;
	uint64_t pulls_served, pulls_failed; /* decode */
	uint64_t pulls_asked, pulls_refused; /* prefill: ended true, ended false */
	uint64_t links_ready, links_refused, links_lost;
	uint64_t bytes_in[KVS_TRANSPORT_COUNT];               /* decode: put in place */
	uint64_t bytes_out[KVS_TRANSPORT_COUNT];              /* prefill: packed and sent */
	uint64_t fallbacks[KVS_TRANSPORT_COUNT];              /* from this transport to the next, in mid-request */
	struct kvs_text fallback_reason[KVS_TRANSPORT_COUNT]; /* the last one */
	uint64_t refusals[KVS_REFUSAL_COUNT];
	bool changed; /* since the file was last written */
	uint64_t written_ns;
};

void kvs_stats_changed(struct kvs_stats *stats);

/* Milliseconds until the file is due, or -1: nothing to write. */
int kvs_stats_due_ms(uint64_t now_ns);

/* The file's text, owned by the caller, and its size; NULL: none is configured, or out of memory. */
char *kvs_stats_text(size_t *size_p);

/* Write such a text to "<path>.<pid>", at once or not at all. No lock held. A failure is logged once. */
void kvs_stats_write(const char *path, const char *text, size_t size);

/* Write the file now if it is configured. Takes the lock itself; the agent thread, or after its end. */
void kvs_stats_flush(bool always);

#endif
