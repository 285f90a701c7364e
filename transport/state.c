/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "state.h"

#include <stdlib.h>
#include <time.h>

#include "cuda_memory.h"
#include "staging.h"

struct kvs_state kvs_state = {
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .changed = PTHREAD_COND_INITIALIZER,
        .epoll = -1,
        .wake = -1,
        .listen_unix = -1,
        .listen_tcp = -1,
};

void kvs_lock(void)
{
	pthread_mutex_lock(&kvs_state.lock);
}

void kvs_unlock(void)
{
	pthread_mutex_unlock(&kvs_state.lock);
}

bool kvs_wait_until(pthread_cond_t *cond, uint64_t deadline_ns)
{
	struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000U),
	                         .tv_nsec = (long)(deadline_ns % 1000000000U)};
	return pthread_cond_clockwait(cond, &kvs_state.lock, CLOCK_MONOTONIC, &until) == 0;
}

uint32_t kvs_table_slot(uint64_t endpoint, uint64_t room)
{
	uint64_t mixed = (room ^ endpoint * 0x9e3779b97f4a7c15U) * 0xd6e8feb86659fd93U;
	return (uint32_t)(mixed >> 32) & (KVS_TABLE_SIZE - 1);
}

void kvs_agent_wake(void)
{
	if (kvs_state.wake >= 0)
		kvs_event_set(kvs_state.wake);
}

struct kvs_endpoint *kvs_endpoint_find(uint64_t id)
{
	for (struct kvs_endpoint *endpoint = kvs_state.endpoints; endpoint != NULL; endpoint = endpoint->next) {
		if (endpoint->id == id)
			return endpoint->removed ? NULL : endpoint;
	}
	return NULL;
}

void kvs_endpoint_unref(struct kvs_endpoint *endpoint)
{
	if (endpoint == NULL || --endpoint->refs > 0)
		return;
	kvs_cuda_memory_free(endpoint->cuda);
	kvs_layout_free(endpoint->layout);
	free(endpoint->host);
	free(endpoint);
}

struct kvs_peer *kvs_peer_find(uint64_t id)
{
	for (struct kvs_peer *peer = kvs_state.peers; peer != NULL; peer = peer->next) {
		if (peer->id == id)
			return peer->removed ? NULL : peer;
	}
	return NULL;
}

void kvs_peer_unref(struct kvs_peer *peer)
{
	if (peer == NULL || --peer->refs > 0)
		return;
	struct kvs_peer **at = &kvs_state.peers;
	while (*at != NULL && *at != peer)
		at = &(*at)->next;
	if (*at == peer)
		*at = peer->next;
	free(peer);
}
