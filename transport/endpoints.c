/* SPDX-License-Identifier: Apache-2.0 */
/* What this process registered, and the records of the decodes that it was told about. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_memory.h"
#include "link.h"
#include "log.h"
#include "rdma.h"
#include "rooms.h"
#include "sock.h"
#include "sources.h"

/* Registered memory must be somewhere, and we must be able to reach it. */
static bool check_memory(const struct kvs_layout *layout, struct kvs_text *text)
{
	for (uint32_t c = 0; c < layout->component_count; c++) {
		for (uint32_t t = 0; t < layout->components[c].tensor_count; t++) {
			const struct kvs_tensor *tensor = &layout->components[c].tensors[t];
			if (tensor->item_len == 0 || tensor->length == 0)
				continue;
			if (tensor->address == 0) {
				kvs_text_set(text, "component %u (%.*s) tensor %u: %" PRIu64 " bytes at a null address",
				             c, KVS_NAME_SIZE, layout->components[c].type, t, tensor->length);
				return false;
			}
		}
	}
	return true;
}

static void make_record(struct kvs_endpoint *endpoint)
{
	const struct kvs_config *config = kvs_config_get();
	struct kvs_record *record = &endpoint->record;
	struct kvs_listen reachable;
	kvs_record_init(record, &kvs_state.self);
	record->endpoint = endpoint->id;
	memcpy(record->key, kvs_state.key, sizeof(record->key));
	memcpy(record->unix_name, kvs_state.unix_name, sizeof(record->unix_name));
	if (kvs_state.tcp.tcp_port != 0) {
		memcpy(record->tcp_address, kvs_state.tcp.tcp_address, sizeof(record->tcp_address));
		record->tcp_family = kvs_state.tcp.tcp_family;
		record->tcp_port = kvs_state.tcp.tcp_port;
		/* One that listens on every interface is reached where the server itself is. */
		if (kvs_record_address_is_any(record) && endpoint->host != NULL &&
		    kvs_listen_parse(endpoint->host, &reachable, NULL))
			kvs_record_set_address(record, &reachable);
	}
	for (uint32_t i = 0; i < config->order_count; i++)
		record->transports |= kvs_transports[config->order[i]].ops != NULL ? 1U << config->order[i] : 0;
}

uint64_t kvs_endpoint_add(enum kvs_role role, const struct kvs_layout *layout, const char *host, struct kvs_text *text)
{
	uint64_t id = 0;
	if (!kvs_layout_check(layout, text) || !check_memory(layout, text))
		return 0;
	struct kvs_endpoint *endpoint = calloc(1, sizeof(*endpoint));
	struct kvs_layout *copy = kvs_layout_clone(layout);
	char *host_copy = host == NULL ? NULL : strdup(host);
	if (endpoint == NULL || copy == NULL || (host != NULL && host_copy == NULL)) {
		kvs_text_set(text, "out of memory");
		free(endpoint);
		kvs_layout_free(copy);
		free(host_copy);
		return 0;
	}
	if (!kvs_cuda_memory_new(copy, &endpoint->cuda, text)) {
		free(endpoint);
		kvs_layout_free(copy);
		free(host_copy);
		return 0;
	}
	endpoint->refs = 1;
	endpoint->role = role;
	endpoint->layout = copy;
	endpoint->host = host_copy;
	endpoint->device_memory = endpoint->cuda != NULL;
	kvs_lock();
	if (kvs_agent_start(role, host, text)) {
		id = endpoint->id = ++kvs_state.last_id;
		if (role == KVS_ROLE_DECODE)
			make_record(endpoint);
		endpoint->next = kvs_state.endpoints;
		kvs_state.endpoints = endpoint;
		kvs_stats_changed(&kvs_state.stats);
		kvs_agent_wake();
	} else {
		kvs_endpoint_unref(endpoint);
	}
	kvs_unlock();
	return id;
}

/* Is nobody left who uses it? */
static bool idle(const struct kvs_endpoint *endpoint)
{
	for (const struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		if (link->endpoint == endpoint)
			return false;
	}
	return endpoint->workers == 0;
}

void kvs_endpoint_remove(uint64_t id)
{
	kvs_lock();
	struct kvs_endpoint *endpoint = kvs_endpoint_find(id);
	if (endpoint == NULL) {
		kvs_unlock();
		return;
	}
	endpoint->removed = true;
	kvs_rooms_close_all(id);
	kvs_agent_wake();
	while (!idle(endpoint))
		pthread_cond_wait(&kvs_state.changed, &kvs_state.lock);
	struct kvs_endpoint **at = &kvs_state.endpoints;
	while (*at != endpoint)
		at = &(*at)->next;
	*at = endpoint->next;
	kvs_sources_forget_all(id);
	kvs_rdma_forget_endpoint(id);
	kvs_endpoint_unref(endpoint);
	kvs_stats_changed(&kvs_state.stats);
	kvs_unlock();
	kvs_agent_stop();
	kvs_stats_flush(true);
}

size_t kvs_endpoint_record(uint64_t id, uint8_t record_p[KVS_RECORD_MAX])
{
	size_t size = 0;
	kvs_lock();
	const struct kvs_endpoint *endpoint = kvs_endpoint_find(id);
	if (endpoint != NULL && endpoint->role == KVS_ROLE_DECODE) {
		size = sizeof(endpoint->record);
		memcpy(record_p, &endpoint->record, size);
	}
	kvs_unlock();
	return size;
}

static void remove_peer(struct kvs_peer *peer)
{
	peer->removed = true;
	kvs_agent_wake(); /* its links end */
	kvs_peer_unref(peer);
}

/* Processes that were here and are gone: a server that restarts often must not make this list grow. */
static void forget_gone_peers(const struct kvs_identity *self)
{
	struct kvs_peer *next;
	for (struct kvs_peer *peer = kvs_state.peers; peer != NULL; peer = next) {
		next = peer->next;
		if (!peer->removed && kvs_identity_same_namespace(self, &peer->identity) &&
		    kvs_identity_start_time(peer->identity.pid) != peer->identity.start_time)
			remove_peer(peer);
	}
}

/* The only prefill endpoint; NULL: there is none, or more than one. */
static struct kvs_endpoint *single_prefill(void)
{
	struct kvs_endpoint *found = NULL;
	for (struct kvs_endpoint *endpoint = kvs_state.endpoints; endpoint != NULL; endpoint = endpoint->next) {
		if (endpoint->role != KVS_ROLE_PREFILL || endpoint->removed)
			continue;
		if (found != NULL)
			return NULL;
		found = endpoint;
	}
	return found;
}

uint64_t kvs_peer_add(const void *record, size_t size, struct kvs_text *text)
{
	struct kvs_record decoded;
	struct kvs_identity self;
	if (!kvs_record_decode(record, size, &decoded, text))
		return 0;
	kvs_identity_self(&self);
	kvs_lock();
	forget_gone_peers(&self);
	struct kvs_peer *peer = kvs_state.peers;
	while (peer != NULL && (peer->removed || memcmp(&peer->record, &decoded, sizeof(decoded)) != 0))
		peer = peer->next;
	if (peer == NULL) {
		peer = calloc(1, sizeof(*peer));
		if (peer == NULL) {
			kvs_text_set(text, "out of memory");
			kvs_unlock();
			return 0;
		}
		peer->refs = 1;
		peer->id = ++kvs_state.last_id;
		peer->record = decoded;
		kvs_record_identity(&decoded, &peer->identity);
		kvs_record_name(&decoded, peer->name, sizeof(peer->name));
		peer->next = kvs_state.peers;
		kvs_state.peers = peer;
	}
	peer->added++;
	uint64_t id = peer->id;
	struct kvs_endpoint *endpoint = single_prefill();
	if (endpoint != NULL)
		(void)kvs_link_open(endpoint, peer);
	kvs_unlock();
	return id;
}

void kvs_peer_remove(uint64_t id)
{
	kvs_lock();
	struct kvs_peer *peer = kvs_peer_find(id);
	if (peer != NULL && --peer->added == 0)
		remove_peer(peer);
	kvs_unlock();
}
