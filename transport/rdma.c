/* SPDX-License-Identifier: Apache-2.0 */
/* The rdma transport's operations, and its messages. */
#define _GNU_SOURCE
#include "rdma.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_link.h"
#include "log.h"

/* Is there any use in rdma for such a link? Memory of one host is better shared, where that is allowed. */
static bool wanted(const struct kvs_link *link, struct kvs_text *reason)
{
	const struct kvs_config *config = kvs_config_get();
	bool rdma = false, host = false;
	for (uint32_t i = 0; i < config->order_count; i++) {
		rdma = rdma || config->order[i] == KVS_TRANSPORT_RDMA;
		host = host || config->order[i] == KVS_TRANSPORT_HOST;
	}
	uint32_t theirs = link->role == KVS_ROLE_PREFILL ? link->peer->record.transports : link->peer_transports;
	host = host && (theirs >> KVS_TRANSPORT_HOST & 1) != 0;
	if (!rdma)
		kvs_text_set(reason, "not among its transports");
	else if (link->is_unix && host)
		kvs_text_set(reason, "the same host");
	else
		return true;
	return false;
}

void kvs_rdma_offer(const struct kvs_link *link, struct kvs_rdma_offer *offer_p)
{
	memset(offer_p, 0, sizeof(*offer_p));
	if (wanted(link, &offer_p->why))
		kvs_rdma_devices_open(kvs_config_get()->rdma_device, kvs_config_get()->rdma_gid - 1, offer_p);
}

bool kvs_rdma_take_offer(struct kvs_link *link, const struct kvs_rdma_offer *offer)
{
	link->rdma = calloc(1, sizeof(*link->rdma));
	if (link->rdma == NULL)
		return false;
	link->rdma->remote = *offer;
	return true;
}

void kvs_rdma_free(struct kvs_link *link)
{
	struct kvs_rdma *rdma = link->rdma;
	link->rdma = NULL;
	if (rdma == NULL)
		return;
	if (rdma->memory != NULL)
		kvs_rdma_discard(rdma);
	else
		free(rdma);
}

static bool moves_something(const struct kvs_link *link)
{
	for (uint32_t c = 0; c < link->endpoint->layout->component_count; c++) {
		if (link->verdicts[c].action == KVS_ACT_SLICE || link->verdicts[c].action == KVS_ACT_COPY)
			return true;
	}
	return false;
}

static uint64_t some_address(const struct kvs_layout *layout)
{
	for (uint32_t c = 0; c < layout->component_count; c++) {
		if (layout->components[c].tensor_count > 0 && layout->components[c].tensors[0].address != 0)
			return layout->components[c].tensors[0].address;
	}
	return 0;
}

static bool rdma_probe(const struct kvs_link *link, struct kvs_text *reason)
{
	struct kvs_rdma *rdma = link->rdma;
	if (!wanted(link, reason))
		return false;
	if (!moves_something(link)) {
		kvs_text_set(reason, "nothing to move");
		return false;
	}
	kvs_rdma_devices_open(kvs_config_get()->rdma_device, kvs_config_get()->rdma_gid - 1, &rdma->local);
	int node = link->endpoint->cuda != NULL ? kvs_rdma_gpu_node(link->endpoint->cuda)
	                                        : kvs_rdma_memory_node(some_address(link->endpoint->layout));
	return kvs_rdma_match(&rdma->local, &rdma->remote, node, &rdma->match, reason);
}

static bool rdma_open(struct kvs_link *link, struct kvs_text *text)
{
	(void)text;
	/* The prefill hears of it after the welcome: the setup thread cannot send before the lock is free. */
	kvs_rdma_begin(link);
	return true;
}

bool kvs_rdma_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body, struct kvs_text *text)
{
	bool prefill = link->role == KVS_ROLE_PREFILL;
	union {
		struct kvs_rdma_connect connect;
		struct kvs_rdma_ready ready;
		struct kvs_rdma_credit credit;
		struct kvs_rdma_packed packed;
	} msg;
	if (link->state != KVS_LINK_READY)
		return false;
	if (type == KVS_MESSAGE_RDMA_CONNECT && prefill && kvs_get_rdma_connect(body, &msg.connect, text)) {
		if (link->rdma == NULL)
			link->rdma = calloc(1, sizeof(*link->rdma));
		if (link->rdma == NULL) {
			kvs_text_set(text, "out of memory");
			return false;
		}
		kvs_rdma_offer(link, &link->rdma->local);
		kvs_rdma_accept(link, &msg.connect);
	} else if (type == KVS_MESSAGE_RDMA_READY && !prefill && kvs_get_rdma_ready(body, &msg.ready, text)) {
		kvs_rdma_finish(link, &msg.ready);
		kvs_rdma_ready_free(&msg.ready);
	} else if (type == KVS_MESSAGE_RDMA_CREDIT && prefill && link->rdma != NULL &&
	           kvs_get_rdma_credit(body, &msg.credit, text)) {
		link->rdma->credit = msg.credit;
		kvs_event_set(link->worker_wake);
	} else if (type == KVS_MESSAGE_RDMA_PACKED && !prefill && kvs_get_rdma_packed(body, &msg.packed, text)) {
		struct kvs_rdma_reader *reader = &link->rdma->reader;
		if (msg.packed.stream == reader->stream && msg.packed.pieces <= reader->credit)
			reader->packed_pieces = msg.packed.pieces;
	} else {
		return false;
	}
	return true;
}

/* ---- prefill ---- */

enum turn {
	TURN_WAIT,
	TURN_DIRECT,
	TURN_PACK,
};

static enum turn next_turn(struct kvs_link *link, uint64_t stream, uint64_t packed, uint8_t **slot_p)
{
	enum turn turn = TURN_WAIT;
	kvs_lock();
	const struct kvs_rdma *rdma = link->rdma;
	if (rdma != NULL && rdma->credit.stream == stream) {
		if (rdma->credit.direct != 0) {
			turn = TURN_DIRECT;
		} else if (packed < rdma->credit.pieces && rdma->slots != NULL) {
			*slot_p = rdma->slots + packed % rdma->slot_count * (size_t)KVS_RDMA_SLOT_SIZE;
			turn = TURN_PACK;
		}
	}
	kvs_unlock();
	return turn;
}

static void tell_packed(struct kvs_link *link, uint64_t stream, uint64_t pieces)
{
	struct kvs_rdma_packed msg = {.stream = stream, .pieces = pieces};
	struct kvs_writer body = {.data = NULL};
	kvs_put_rdma_packed(&body, &msg);
	kvs_lock();
	kvs_link_send(link, KVS_MESSAGE_RDMA_PACKED, &body, NULL, 0);
	kvs_unlock();
}

static bool send_pieces(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	struct kvs_cursor cursor = {.copy = 0};
	uint64_t left = request->plan->bytes, pieces = 0;
	while (!kvs_request_stopped(request)) {
		uint8_t *slot = NULL;
		enum turn turn = next_turn(link, stream, pieces, &slot);
		if (turn == TURN_DIRECT)
			return true; /* the decode reads by itself */
		if (turn == TURN_PACK) {
			size_t size = left < KVS_RDMA_SLOT_SIZE ? (size_t)left : KVS_RDMA_SLOT_SIZE;
			if (!kvs_linear_get(link, request->plan, stream, &cursor, slot, size, text))
				return false;
			left -= size;
			tell_packed(link, stream, ++pieces);
			if (left == 0)
				return true;
			continue;
		}
		uint64_t now = kvs_now_ns();
		if (now >= request->deadline_ns) {
			kvs_text_set(text, "the decode asked for nothing in time");
			return false;
		}
		struct pollfd fd = {.fd = link->worker_wake, .events = POLLIN};
		(void)poll(&fd, 1, (int)((request->deadline_ns - now) / 1000000) + 1);
		kvs_event_clear(link->worker_wake);
	}
	return false;
}

static bool rdma_send(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	bool sent = send_pieces(link, request, stream, text);
	kvs_linear_end(link);
	return sent;
}

/* ---- decode ---- */

static enum kvs_step rdma_pull(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	enum kvs_rdma_state state = rdma->state;
	switch (state) {
	case KVS_RDMA_SETUP:
		return KVS_STEP_IDLE; /* the setup thread wakes the agent */
	case KVS_RDMA_UP:
		if (rdma->reader.stream == sink->stream || !kvs_rdma_is_stale(link))
			return kvs_rdma_read_more(link, sink, text);
		kvs_lock();
		kvs_rdma_begin(link);
		kvs_unlock();
		return KVS_STEP_IDLE;
	case KVS_RDMA_BROKEN:
	case KVS_RDMA_GIVEN_UP:
		kvs_lock();
		*text = rdma->text;
		kvs_unlock();
		return KVS_STEP_FAILED;
	}
	return KVS_STEP_FAILED;
}

static bool rdma_ready(const struct kvs_link *link)
{
	return link->rdma->state == KVS_RDMA_UP && kvs_rdma_outstanding(link->rdma) > 0 && kvs_rdma_peek(link->rdma);
}

void kvs_rdma_event(struct kvs_link *link)
{
	struct kvs_ibv_cq *cq;
	void *user;
	struct kvs_rdma *rdma = link->rdma;
	if (rdma == NULL || rdma->pair.channel == NULL)
		return;
	const struct kvs_verbs *verbs = rdma->pair.device->verbs;
	while (verbs->get_cq_event(rdma->pair.channel, &cq, &user) == 0)
		verbs->ack_cq_events(cq, 1);
}

static bool rdma_wait(struct kvs_link *link)
{
	struct kvs_rdma *rdma = link->rdma;
	if (rdma->state != KVS_RDMA_UP)
		return rdma->state == KVS_RDMA_SETUP;
	if (kvs_rdma_outstanding(rdma) == 0)
		return true;
	if (kvs_verbs_req_notify_cq(rdma->pair.cq) != 0)
		return false;
	return !kvs_rdma_peek(rdma);
}

static bool rdma_in_flight(const struct kvs_link *link)
{
	return link->rdma != NULL && kvs_rdma_outstanding(link->rdma) > 0;
}

static void rdma_close(struct kvs_link *link, bool ok)
{
	struct kvs_rdma *rdma = link->rdma;
	if (link->role == KVS_ROLE_PREFILL || rdma == NULL || rdma->state == KVS_RDMA_SETUP)
		return;
	struct kvs_rdma_reader *reader = &rdma->reader;
	struct kvs_text why = reader->error;
	bool broken = why.s[0] != '\0' || kvs_rdma_outstanding(rdma) > 0;
	(void)ok;
	reader->stream = 0;
	if (!broken || rdma->state != KVS_RDMA_UP)
		return;
	/* A READ cannot be called back: the pair goes with those that are on their way. */
	kvs_rdma_pair_quiesce(&rdma->pair);
	reader->retired = reader->posted;
	reader->in_flight = 0;
	reader->has_early = false;
	reader->error.s[0] = '\0';
	kvs_rdma_broken(link, why.s[0] != '\0' ? why.s : "a transfer ended early with READs on their way");
}

const struct kvs_transport_ops kvs_transport_rdma = {
        .probe = rdma_probe,
        .open = rdma_open,
        .send = rdma_send,
        .pull = rdma_pull,
        .ready = rdma_ready,
        .wait = rdma_wait,
        .in_flight = rdma_in_flight,
        .close = rdma_close,
};
