/* SPDX-License-Identifier: Apache-2.0 */
#include "sources.h"

#include <stdlib.h>

struct kvs_source *kvs_sources_find(uint64_t endpoint, uint64_t room)
{
	struct kvs_source *source = kvs_state.sources[kvs_table_slot(endpoint, room)];
	while (source != NULL && (source->endpoint != endpoint || source->room != room))
		source = source->next;
	return source;
}

struct kvs_source *kvs_sources_get(uint64_t endpoint, uint64_t room)
{
	struct kvs_source *source = kvs_sources_find(endpoint, room);
	if (source != NULL)
		return source;
	source = calloc(1, sizeof(*source));
	if (source == NULL)
		return NULL;
	uint32_t slot = kvs_table_slot(endpoint, room);
	source->endpoint = endpoint;
	source->room = room;
	source->next = kvs_state.sources[slot];
	kvs_state.sources[slot] = source;
	return source;
}

bool kvs_sources_fail(uint64_t endpoint, uint64_t room, const char *text)
{
	struct kvs_source *source = kvs_sources_get(endpoint, room);
	if (source == NULL || source->failed)
		return false;
	source->failed = true;
	kvs_text_set(&source->text, "%s", text);
	return true;
}

bool kvs_sources_ended(uint64_t endpoint, uint64_t room, struct kvs_text *text_p)
{
	const struct kvs_source *source = kvs_sources_find(endpoint, room);
	if (source == NULL || (!source->failed && !source->cancelled))
		return false;
	if (text_p != NULL) {
		if (source->failed)
			*text_p = source->text;
		else
			kvs_text_set(text_p, "the prefill cancelled the request");
	}
	return true;
}

void kvs_sources_forget(uint64_t endpoint, uint64_t room)
{
	struct kvs_source **at = &kvs_state.sources[kvs_table_slot(endpoint, room)];
	while (*at != NULL && ((*at)->endpoint != endpoint || (*at)->room != room))
		at = &(*at)->next;
	if (*at == NULL)
		return;
	struct kvs_source *source = *at;
	*at = source->next;
	free(source);
}

void kvs_sources_forget_all(uint64_t endpoint)
{
	for (uint32_t i = 0; i < KVS_TABLE_SIZE; i++) {
		struct kvs_source **at = &kvs_state.sources[i];
		while (*at != NULL) {
			struct kvs_source *source = *at;
			if (source->endpoint != endpoint) {
				at = &source->next;
				continue;
			}
			*at = source->next;
			free(source);
		}
	}
}
