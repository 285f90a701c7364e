/* SPDX-License-Identifier: Apache-2.0 */
#include "rooms.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_memory.h"
#include "log.h"

struct kvs_room *kvs_rooms_find(uint64_t endpoint, uint64_t number, uint64_t generation)
{
	for (struct kvs_room *room = kvs_state.rooms[kvs_table_slot(endpoint, number)]; room != NULL;
	     room = room->next) {
		if (room->endpoint == endpoint && room->number == number)
			return room->closing || (generation != 0 && generation != room->generation) ? NULL : room;
	}
	return NULL;
}

void kvs_room_fail(struct kvs_room *room, const char *text)
{
	if (room->failed)
		return;
	room->failed = true;
	kvs_text_set(&room->text, "%s", text);
	kvs_state.stats.rooms_failed++;
	kvs_stats_changed(&kvs_state.stats);
}

bool kvs_room_allows(const struct kvs_room *room, uint32_t component, const int32_t *items, uint32_t count,
                     struct kvs_text *text)
{
	int32_t missing;
	if (component >= room->set_count) {
		kvs_text_set(text, "room %" PRIu64 " has no component %u", room->number, component);
		return false;
	}
	if (!kvs_itemset_holds(&room->sets[component], items, count, &missing)) {
		kvs_text_set(text,
		             "room %" PRIu64 " component %u: destination item %d is not among the %u that the receiver "
		             "published",
		             room->number, component, missing, room->sets[component].count);
		return false;
	}
	return true;
}

static void room_free(struct kvs_room *room)
{
	for (uint32_t c = 0; c < room->set_count && room->sets != NULL; c++)
		kvs_itemset_free(&room->sets[c]);
	free(room->sets);
	free(room);
}

static void transport_names(uint32_t mask, char *names_p, size_t size)
{
	size_t used = 0;
	names_p[0] = '\0';
	for (uint32_t i = 0; i < KVS_TRANSPORT_COUNT; i++) {
		if ((mask >> i & 1) == 0 || used >= size)
			continue;
		int more = snprintf(names_p + used, size - used, "%s%s", used > 0 ? "+" : "", kvs_transports[i].name);
		used += more > 0 ? (size_t)more : 0;
	}
}

/* The room's one line; scripts read it. A room that we moved nothing for and know nothing bad about has none. */
static void kvs_room_report(const struct kvs_room *room, enum kvs_room_end end)
{
	char route[64];
	if (room->failed) {
		kvs_log(KVS_LOG_INFO, "room %" PRIu64 " failed: %s", room->number, room->text.s);
		return;
	}
	if (room->pulls == 0)
		return;
	if (end != KVS_ROOM_SUCCESS) {
		kvs_log(KVS_LOG_INFO,
		        "room %" PRIu64 " failed: the connector ended it after %" PRIu64 " bytes of ours were in place",
		        room->number, room->bytes);
		return;
	}
	transport_names(room->transports, route, sizeof(route));
	kvs_log(KVS_LOG_INFO,
	        "room %" PRIu64 " done: route=%s components=%d bytes=%" PRIu64 " copies=%" PRIu64
	        " ms=%.3f wait_ms=%.3f copy_ms=%.3f plan_us=%.1f pulls=%" PRIu64 " prefill_ranks=%d",
	        room->number, route, __builtin_popcount(room->components), room->bytes, room->runs,
	        (double)(room->last_ns - room->first_ns) / 1e6, (double)(room->first_ns - room->opened_ns) / 1e6,
	        (double)room->copy_ns / 1e6, (double)room->plan_ns / 1e3, room->pulls,
	        __builtin_popcountll(room->prefill_ranks));
}

/* Take the room out of the table once no piece of it is being written. Another thread may have done so meanwhile. */
static void close_room(uint64_t endpoint, uint64_t number, enum kvs_room_end end)
{
	struct kvs_room **at;
	for (;;) {
		at = &kvs_state.rooms[kvs_table_slot(endpoint, number)];
		while (*at != NULL && ((*at)->endpoint != endpoint || (*at)->number != number))
			at = &(*at)->next;
		if (*at == NULL)
			return;
		(*at)->closing = true;
		if ((*at)->busy == 0)
			break;
		kvs_agent_wake(); /* what is in flight by itself is ended by it */
		pthread_cond_wait(&kvs_state.changed, &kvs_state.lock);
	}
	struct kvs_room *room = *at;
	*at = room->next;
	if (!room->failed && end == KVS_ROOM_SUCCESS && room->pulls > 0)
		kvs_state.stats.rooms_done++;
	kvs_stats_changed(&kvs_state.stats);
	kvs_room_report(room, end);
	room_free(room);
	pthread_cond_broadcast(&kvs_state.changed); /* others may wait for this room's busy count, which is gone */
	kvs_agent_wake();                           /* queued pulls of this room end now */
}

void kvs_rooms_close_all(uint64_t endpoint)
{
	for (uint32_t i = 0; i < KVS_TABLE_SIZE; i++) {
		struct kvs_room *room = kvs_state.rooms[i];
		while (room != NULL) {
			if (room->endpoint != endpoint) {
				room = room->next;
				continue;
			}
			close_room(endpoint, room->number, KVS_ROOM_FAILURE);
			room = kvs_state.rooms[i];
		}
	}
}

uint32_t kvs_rooms_count(void)
{
	uint32_t count = 0;
	for (uint32_t i = 0; i < KVS_TABLE_SIZE; i++) {
		for (const struct kvs_room *room = kvs_state.rooms[i]; room != NULL; room = room->next)
			count++;
	}
	return count;
}

/* The published items of one component: inside the registered memory of every tensor that it has here. */
static bool check_items(const struct kvs_layout *layout, uint32_t c, const struct kvs_itemset *set,
                        struct kvs_text *text)
{
	const struct kvs_component *component = &layout->components[c];
	if (set->count == 0)
		return true;
	uint64_t last = set->items[set->count - 1];
	for (uint32_t t = 0; t < component->tensor_count; t++) {
		const struct kvs_tensor *tensor = &component->tensors[t];
		if (tensor->item_len != 0 && last >= tensor->length / tensor->item_len) {
			kvs_text_set(text,
			             "component %u (%.*s): item %" PRIu64
			             " is past the end of tensor %u, which has %" PRIu64 " items",
			             c, KVS_NAME_SIZE, component->type, last, t, tensor->length / tensor->item_len);
			return false;
		}
	}
	return true;
}

static struct kvs_room *room_new(const struct kvs_endpoint *endpoint, const struct kvs_item_list *lists,
                                 uint32_t component_count, struct kvs_text *text)
{
	const struct kvs_layout *layout = endpoint->layout;
	if (component_count > layout->component_count) {
		kvs_text_set(text, "lists for %u components, but %u are registered", component_count,
		             layout->component_count);
		return NULL;
	}
	struct kvs_room *room = calloc(1, sizeof(*room));
	if (room == NULL) {
		kvs_text_set(text, "out of memory");
		return NULL;
	}
	room->sets = calloc(layout->component_count + 1, sizeof(*room->sets));
	if (room->sets == NULL) {
		kvs_text_set(text, "out of memory");
		room_free(room);
		return NULL;
	}
	room->set_count = layout->component_count;
	for (uint32_t c = 0; c < component_count; c++) {
		int32_t bad;
		if (!kvs_itemset_init(&room->sets[c], lists[c].items, lists[c].count, &bad)) {
			if (bad < 0)
				kvs_text_set(text, "component %u: item %d is negative", c, bad);
			else
				kvs_text_set(text, "out of memory for %u items", lists[c].count);
			room_free(room);
			return NULL;
		}
		if (!check_items(layout, c, &room->sets[c], text)) {
			room_free(room);
			return NULL;
		}
	}
	return room;
}

/* Is the memory of these items there? What was replaced since it was last looked at is taken as it is now. */
static bool destinations_there(struct kvs_endpoint *owner, const struct kvs_item_list *lists, uint32_t component_count,
                               struct kvs_text *text)
{
	struct kvs_text why;
	for (uint32_t c = 0; c < component_count; c++) {
		if (kvs_cuda_memory_check_items(owner->cuda, c, lists[c].items, lists[c].count, &why))
			continue;
		kvs_log(KVS_LOG_INFO, "%s: looking at all registered memory again", why.s);
		return kvs_cuda_memory_renew(owner->cuda, text);
	}
	return true;
}

uint64_t kvs_room_open(uint64_t endpoint, uint64_t room, const struct kvs_item_list *lists, uint32_t component_count,
                       struct kvs_text *text)
{
	uint64_t generation = 0;
	kvs_lock();
	struct kvs_endpoint *owner = kvs_endpoint_find(endpoint);
	if (owner == NULL || owner->role != KVS_ROLE_DECODE) {
		kvs_text_set(text, "room %" PRIu64 ": %" PRIu64 " is no decode endpoint of this process", room,
		             endpoint);
		kvs_unlock();
		return 0;
	}
	struct kvs_room *made = room_new(owner, lists, component_count, text);
	if (made != NULL && !destinations_there(owner, lists, component_count, text)) {
		room_free(made);
		made = NULL;
	}
	if (made != NULL) {
		made->memory_epoch = kvs_cuda_memory_epoch(owner->cuda);
		close_room(endpoint, room, KVS_ROOM_FAILURE);
		/* While that waited the lock was free. */
		owner = kvs_endpoint_find(endpoint);
		if (owner == NULL || kvs_rooms_find(endpoint, room, 0) != NULL) {
			kvs_text_set(text, "room %" PRIu64 " was opened or its endpoint removed by another thread",
			             room);
			room_free(made);
		} else {
			uint32_t slot = kvs_table_slot(endpoint, room);
			made->endpoint = endpoint;
			made->number = room;
			made->generation = generation = ++kvs_state.last_id;
			made->opened_ns = kvs_now_ns();
			made->next = kvs_state.rooms[slot];
			kvs_state.rooms[slot] = made;
			kvs_state.stats.rooms_opened++;
			kvs_stats_changed(&kvs_state.stats);
		}
	}
	kvs_unlock();
	return generation;
}

enum kvs_room_state kvs_room_state(uint64_t endpoint, uint64_t room, struct kvs_text *text_p)
{
	enum kvs_room_state state = KVS_ROOM_UNKNOWN;
	kvs_lock();
	const struct kvs_room *found = kvs_rooms_find(endpoint, room, 0);
	if (found != NULL) {
		state = found->failed ? KVS_ROOM_FAILED : KVS_ROOM_OPEN;
		if (found->failed && text_p != NULL)
			*text_p = found->text;
	}
	kvs_unlock();
	return state;
}

void kvs_room_close(uint64_t endpoint, uint64_t room, enum kvs_room_end end)
{
	kvs_lock();
	close_room(endpoint, room, end);
	kvs_unlock();
}
