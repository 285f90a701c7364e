/* SPDX-License-Identifier: Apache-2.0 */
#include "world.h"

#include <string.h>

#include "../../transport/log.h"

static struct world *logged;

static void keep_log(enum kvs_log_level level, const char *function, const char *text)
{
	if (getenv("KVS_TEST_VERBOSE") != NULL)
		fprintf(stderr, "[decode] %d %s: %s\n", (int)level, function, text);
	size_t used = logged == NULL ? 0 : strlen(logged->log);
	if (logged != NULL && level <= KVS_LOG_INFO && used + strlen(text) + 2 < sizeof(logged->log))
		(void)snprintf(logged->log + used, sizeof(logged->log) - used, "%s\n", text);
}

void world_new(struct world *w, const struct setting *setting)
{
	struct kvs_text text = {.s = ""};
	memset(w, 0, sizeof(*w));
	w->setting = *setting;
	w->peer = peer_start(setting->environment, setting->apart);
	if (setting->apart) {
		enter_namespace();
		w->peer.pid = 0;
	}
	w->driver = driver_start(setting->d_device);
	logged = w;
	kvs_log_set_sink(keep_log, KVS_LOG_DEBUG);
	struct kvs_agent_config config = {.timeout_ms = setting->timeout_ms != 0 ? setting->timeout_ms : 10000,
	                                  .staging_bytes = 8u << 20,
	                                  .transports = setting->transports,
	                                  .verify = setting->verify};
	CHECK(kvs_agent_configure(&config, &text), "%s", text.s);
	struct message m = {.order = ORDER_SETUP,
	                    .shape = setting->shape,
	                    .tp_size = setting->p_size,
	                    .device = setting->p_device,
	                    .kind = setting->p_kind,
	                    .parts = setting->parts,
	                    .timeout_ms = setting->timeout_ms,
	                    .verify = setting->verify};
	(void)snprintf(m.transports, sizeof(m.transports), "%s", setting->transports);
	struct answer answer = peer_do(&w->peer, &m);
	if (!answer.ok && answer.number == SKIPPED)
		SKIP("%s", answer.text);
	CHECK(answer.ok, "%s", answer.text);
	for (uint32_t d = 0; d < setting->d_size; d++) {
		w->ranks[d] = rank_new(w->driver, &setting->shape, setting->d_size, d, setting->d_device,
		                       setting->d_kind, setting->parts, 0);
		rank_blank(w->driver, &w->ranks[d]);
		w->endpoints[d] = kvs_endpoint_add(KVS_ROLE_DECODE, w->ranks[d].layout, "127.0.0.1", &text);
		CHECK(w->endpoints[d] != 0, "%s", text.s);
		struct message tell = {.order = ORDER_PEER};
		tell.record_size = (uint32_t)kvs_endpoint_record(w->endpoints[d], tell.record);
		answer = peer_do(&w->peer, &tell);
		CHECK(answer.ok, "%s", answer.text);
		w->peers[d] = answer.number;
	}
}

void world_check_empty(const struct world *w)
{
	static const char *const kinds[] = {"ipc", "handles", "streams", "events", "modules", "host", "pushed"};
	if (w->driver->live == NULL)
		return;
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		CHECK(w->driver->live(kinds[i]) == 0, "%d %s are left", w->driver->live(kinds[i]), kinds[i]);
	CHECK(w->driver->live("retained") <= 2, "%d contexts", w->driver->live("retained"));
}

void world_free(struct world *w)
{
	for (uint32_t d = 0; d < w->setting.d_size; d++)
		kvs_endpoint_remove(w->endpoints[d]);
	world_check_empty(w);
	for (uint32_t d = 0; d < w->setting.d_size; d++)
		rank_free(w->driver, &w->ranks[d]);
	peer_stop(&w->peer);
	if (w->driver->live != NULL)
		CHECK(w->driver->live("mappings") == 0 && w->driver->live("reservations") == 0 &&
		      w->driver->live("allocations") == 0);
}

struct room room_new(struct world *w, uint64_t number, uint32_t d, uint32_t count)
{
	struct room room = {.number = number, .d = d};
	struct kvs_item_list lists[COMPONENTS];
	struct kvs_text text = {.s = ""};
	uint32_t items = w->setting.shape.items;
	count = count < items ? count : items;
	count = count < PEER_ITEMS ? count : PEER_ITEMS;
	for (uint32_t i = 0; i < count; i++) {
		/* In stretches of two and backwards, which no order of memory is. */
		room.src[i] = (int32_t)((i ^ 1) < count ? i ^ 1 : i);
		room.dst[i] = (int32_t)(items - 1 - i);
	}
	for (uint32_t c = 0; c < COMPONENTS; c++) {
		room.counts[c] = c == 0 ? count : (count + 1) / 2;
		lists[c] = (struct kvs_item_list){.items = room.dst, .count = room.counts[c]};
	}
	rank_blank(w->driver, &w->ranks[d]);
	room.generation = kvs_room_open(w->endpoints[d], number, lists, COMPONENTS, &text);
	CHECK(room.generation != 0, "%s", text.s);
	return room;
}

struct message room_pull(const struct world *w, const struct room *room, uint32_t r, uint32_t component)
{
	struct message m = {.order = ORDER_PULL,
	                    .rank = r,
	                    .peer = w->peers[room->d],
	                    .room = room->number,
	                    .generation = room->generation,
	                    .component = component,
	                    .count = room->counts[component]};
	memcpy(m.src, room->src, sizeof(m.src));
	memcpy(m.dst, room->dst, sizeof(m.dst));
	return m;
}

struct answer room_run(struct world *w, const struct room *room)
{
	struct answer answer = {.ok = true};
	uint32_t p = w->setting.p_size, d = w->setting.d_size;
	for (uint32_t r = 0; r < p && answer.ok; r++) {
		bool serves = p >= d ? r / (p / d) == room->d : room->d / (d / p) == r;
		for (uint32_t c = 0; c < COMPONENTS && serves && answer.ok; c++) {
			struct message m = room_pull(w, room, r, c);
			answer = peer_do(&w->peer, &m);
		}
	}
	return answer;
}

uint64_t room_verify(const struct world *w, const struct room *room, bool moved)
{
	static const uint32_t none[COMPONENTS];
	return rank_verify(w->driver, &w->ranks[room->d], room->src, room->dst, moved ? room->counts : none);
}

void room_end(const struct world *w, const struct room *room, bool ok)
{
	kvs_room_close(w->endpoints[room->d], room->number, ok ? KVS_ROOM_SUCCESS : KVS_ROOM_FAILURE);
}

struct answer world_do(struct world *w, enum order order, uint32_t rank, const char *text)
{
	struct message m = {.order = order, .rank = rank};
	(void)snprintf(m.text, sizeof(m.text), "%s", text == NULL ? "" : text);
	return peer_do(&w->peer, &m);
}
