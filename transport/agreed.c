/* SPDX-License-Identifier: Apache-2.0 */
#include "agreed.h"

#include "link.h"

/* Is a prefill rank of this place connected to the endpoint? The lock held. */
static bool is_connected(const struct kvs_endpoint *endpoint, uint32_t tp_size, uint32_t tp_rank)
{
	for (const struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		if (link->role == KVS_ROLE_DECODE && link->endpoint == endpoint && link->state == KVS_LINK_READY &&
		    !link->drop && link->peer_layout->tp_size == tp_size && link->peer_layout->tp_rank == tp_rank)
			return true;
	}
	return false;
}

bool kvs_endpoint_agreed(uint64_t id, uint32_t prefill_tp_size)
{
	kvs_lock();
	const struct kvs_endpoint *endpoint = kvs_endpoint_find(id);
	bool agreed = false;
	if (endpoint != NULL && endpoint->role == KVS_ROLE_DECODE && prefill_tp_size > 0) {
		uint32_t decode_tp_size = endpoint->layout->tp_size;
		uint32_t rank = endpoint->layout->tp_rank;
		uint32_t first = 0;
		uint32_t count = 0;
		if (prefill_tp_size % decode_tp_size == 0) {
			count = prefill_tp_size / decode_tp_size;
			first = rank * count;
		} else if (decode_tp_size % prefill_tp_size == 0) {
			count = 1;
			first = rank / (decode_tp_size / prefill_tp_size);
		}
		agreed = count > 0;
		for (uint32_t i = 0; agreed && i < count; i++)
			agreed = is_connected(endpoint, prefill_tp_size, first + i);
	}
	kvs_unlock();
	return agreed;
}
