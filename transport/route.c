/* SPDX-License-Identifier: Apache-2.0 */
/* Which transports carry a link, in which order, and why not the others. */
#include <stdio.h>
#include <string.h>

#include "link.h"
#include "log.h"

struct kvs_transport_row kvs_transports[KVS_TRANSPORT_COUNT] = {
#define X(number, id, name, ops, reason) [number] = {name, ops, reason},
        KVS_TRANSPORT_TABLE(X)
#undef X
};

static int find_name(const char *name, size_t length)
{
	for (int i = 0; i < KVS_TRANSPORT_COUNT; i++) {
		if (strlen(kvs_transports[i].name) == length && strncmp(kvs_transports[i].name, name, length) == 0)
			return i;
	}
	return -1;
}

uint32_t kvs_transport_order(const char *names, uint32_t order_p[KVS_TRANSPORT_COUNT], struct kvs_text *text)
{
	uint32_t count = 0, seen = 0;
	const char *at = names;
	for (;;) {
		at += strspn(at, ", \t");
		size_t length = strcspn(at, ", \t");
		if (length == 0)
			break;
		int found = find_name(at, length);
		if (found < 0 || (seen >> found & 1) != 0) {
			kvs_text_set(text, "transport '%.*s' %s (known: cuda_ipc, rdma, host, tcp, engine)",
			             (int)length, at, found < 0 ? "is not known" : "is named twice");
			return 0;
		}
		seen |= 1U << found;
		order_p[count++] = (uint32_t)found;
		at += length;
	}
	if (count == 0)
		kvs_text_set(text, "no transport is named (known: cuda_ipc, rdma, host, tcp, engine)");
	return count;
}

static void append(struct kvs_text *text, const char *separator, const char *name, const char *reason)
{
	size_t used = strlen(text->s);
	(void)snprintf(text->s + used, sizeof(text->s) - used, "%s%s%s%.250s", used > 0 ? separator : "", name,
	               *reason != '\0' ? ": " : "", reason);
}

void kvs_route_choose(struct kvs_link *link, struct kvs_text *why_p)
{
	const struct kvs_config *config = kvs_config_get();
	struct kvs_text chosen = {.s = ""}, skipped = {.s = ""};
	link->route_count = 0;
	for (uint32_t i = 0; i < config->order_count; i++) {
		uint32_t id = config->order[i];
		const struct kvs_transport_row *row = &kvs_transports[id];
		struct kvs_text reason = {.s = ""};
		if (row->ops == NULL)
			kvs_text_set(&reason, "%s", row->reason);
		else if ((link->peer_transports >> id & 1) == 0)
			kvs_text_set(&reason, "not among the prefill's transports");
		else if (row->ops->probe(link, &reason) && row->ops->open(link, &reason)) {
			link->route[link->route_count++] = id;
			append(&chosen, ", then ", row->name, "");
			continue;
		}
		append(&skipped, "; ", row->name, reason.s);
	}
	kvs_text_set(why_p, "%.80s%s%.410s%s", link->route_count > 0 ? chosen.s : "none",
	             skipped.s[0] != '\0' ? " (passed over: " : "", skipped.s, skipped.s[0] != '\0' ? ")" : "");
}
