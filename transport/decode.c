/* SPDX-License-Identifier: Apache-2.0 */
/* The decode's end of a link: the handshake, and what a prefill asks for. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "cuda_link.h"
#include "link.h"
#include "log.h"
#include "rdma.h"
#include "rooms.h"
#include "sha256.h"

static void refuse(struct kvs_link *link, const char *why)
{
	struct kvs_writer body = {.data = NULL};
	kvs_put_string(&body, why);
	kvs_link_send(link, KVS_MESSAGE_REFUSE, &body, NULL, 0);
	link->refused = true;
	kvs_link_drop(link, "%s", why);
}

static void on_hello(struct kvs_link *link, const struct kvs_msg_hello *msg)
{
	const struct kvs_config *config = kvs_config_get();
	struct kvs_writer body = {.data = NULL};
	struct kvs_msg_challenge answer = {.has_secret = config->has_secret ? 1 : 0};
	struct kvs_endpoint *endpoint = kvs_endpoint_find(msg->endpoint);
	(void)snprintf(link->name, sizeof(link->name), "a prefill (%s)", link->is_unix ? "this host" : "over TCP");
	if (endpoint == NULL || endpoint->role != KVS_ROLE_DECODE) {
		refuse(link, "the decode has no such endpoint (any more)");
		return;
	}
	if ((msg->has_secret != 0) != config->has_secret) {
		refuse(link,
		       config->has_secret
		               ? "KVSPLICE_SECRET_FILE is set at the decode and not at the prefill: set it at both"
		               : "KVSPLICE_SECRET_FILE is set at the prefill and not at the decode: set it at both");
		return;
	}
	if (!kvs_random(link->nonce, sizeof(link->nonce)) || !kvs_random(link->token, sizeof(link->token))) {
		kvs_link_drop(link, "no random bytes: %m");
		return;
	}
	link->endpoint = endpoint;
	endpoint->refs++;
	memcpy(link->peer_nonce, msg->nonce, sizeof(link->peer_nonce));
	memcpy(answer.nonce, link->nonce, sizeof(answer.nonce));
	kvs_secret_proof("decode", msg->nonce, link->nonce, link->conn.key, answer.proof);
	kvs_put_challenge(&body, &answer);
	link->state = KVS_LINK_PROVING;
	kvs_link_send(link, KVS_MESSAGE_CHALLENGE, &body, NULL, 0);
}

static void send_welcome(struct kvs_link *link)
{
	struct kvs_writer body = {.data = NULL};
	struct kvs_msg_welcome msg = {.layout = link->endpoint->layout};
	int fds[KVS_STAGING_FD_MAX] = {-1, -1, -1};
	uint32_t fd_count = 0;
	memcpy(msg.token, link->token, sizeof(msg.token));
	kvs_route_choose(link, &msg.why);
	msg.route_count = link->route_count;
	memcpy(msg.route, link->route, sizeof(link->route));
	if (link->staging.shared != NULL) {
		msg.slot_count = link->staging.slot_count;
		msg.slot_size = link->staging.slot_size;
		fds[fd_count++] = link->staging.memory;
		fds[fd_count++] = link->staging.data;
		fds[fd_count++] = link->staging.space;
		if (!kvs_watch_add(link->staging.data, EPOLLIN, KVS_WATCH_STAGING, link->id)) {
			kvs_link_drop(link, "epoll: %m");
			return;
		}
	}
	kvs_put_welcome(&body, &msg);
	link->state = KVS_LINK_READY;
	kvs_text_set(&link->text, "%s", msg.why.s);
	kvs_state.stats.links_ready++;
	kvs_stats_changed(&kvs_state.stats);
	kvs_log(link->route_count > 0 ? KVS_LOG_INFO : KVS_LOG_WARN, "%s: route: %s", link->name, msg.why.s);
	kvs_link_send(link, KVS_MESSAGE_WELCOME, &body, fds, fd_count);
}

/* Takes over msg->layout. */
static void on_identity(struct kvs_link *link, struct kvs_msg_identity *msg)
{
	struct kvs_text text;
	uint8_t expected[KVS_PROOF_SIZE];
	link->peer_layout = msg->layout;
	kvs_secret_proof("prefill", link->peer_nonce, link->nonce, link->conn.key, expected);
	if (!kvs_equal_constant_time(expected, msg->proof, sizeof(expected))) {
		refuse(link, "the prefill does not know the decode's secret: KVSPLICE_SECRET_FILE differs");
		return;
	}
	if (link->is_unix && !kvs_identity_check_socket(link->conn.fd, &kvs_state.self, &msg->identity, &text)) {
		refuse(link, text.s);
		return;
	}
	link->peer_identity = msg->identity;
	(void)snprintf(link->name, sizeof(link->name), "prefill pid %u rank %u of %u (%s)", msg->identity.pid,
	               msg->layout->tp_rank, msg->layout->tp_size, link->is_unix ? "this host" : "over TCP");
	link->splice_equal_tp = msg->splice_equal_tp != 0;
	link->peer_transports = msg->transports;
	link->peer_device_memory = msg->device_memory != 0;
	if (!kvs_link_judge(link) || !kvs_rdma_take_offer(link, &msg->rdma) ||
	    !kvs_cuda_take_offer(link, msg->cuda, msg->cuda_size)) {
		kvs_link_drop(link, "out of memory");
		return;
	}
	send_welcome(link);
}

/* This connection is not a link: it carries the bytes of one. It ends here, its socket goes to that link. */
static void on_data(struct kvs_link *link, const struct kvs_msg_data *msg)
{
	struct kvs_link *owner = kvs_state.links;
	while (owner != NULL && (owner->role != KVS_ROLE_DECODE || owner->state != KVS_LINK_READY ||
	                         !kvs_equal_constant_time(owner->token, msg->token, sizeof(msg->token))))
		owner = owner->next;
	if (owner == NULL || owner->data_buffer == NULL || owner->data_fd >= 0) {
		kvs_link_drop(link, "a data connection for no link that waits for one");
		return;
	}
	owner->data_fd = link->conn.fd;
	link->conn.fd = -1;
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uint64_t)KVS_WATCH_DATA << 56 | owner->id};
	if (epoll_ctl(kvs_state.epoll, EPOLL_CTL_MOD, owner->data_fd, &event) != 0) {
		close(owner->data_fd);
		owner->data_fd = -1;
	}
	kvs_link_drop(link, "it became the data connection of another");
}

static void on_fail(struct kvs_link *link, const struct kvs_msg_fail *msg)
{
	struct kvs_room *room = kvs_rooms_find(link->endpoint->id, msg->room, msg->generation);
	if (room == NULL)
		return;
	struct kvs_text text;
	kvs_text_set(&text, "%.60s: %.400s", link->name, msg->text.s);
	kvs_room_fail(room, text.s);
}

static bool handshake_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body, struct kvs_text *text)
{
	union {
		struct kvs_msg_hello hello;
		struct kvs_msg_identity identity;
		struct kvs_msg_data data;
	} msg;
	struct kvs_text why;
	if (type == KVS_MESSAGE_HELLO && link->state == KVS_LINK_GREETING && kvs_get_hello(body, &msg.hello, text))
		on_hello(link, &msg.hello);
	else if (type == KVS_MESSAGE_DATA && link->state == KVS_LINK_GREETING && kvs_get_data(body, &msg.data, text))
		on_data(link, &msg.data);
	else if (type == KVS_MESSAGE_IDENTITY && link->state == KVS_LINK_PROVING &&
	         kvs_get_identity(body, &msg.identity, text))
		on_identity(link, &msg.identity);
	else if (type == KVS_MESSAGE_REFUSE && link->state == KVS_LINK_PROVING && kvs_get_refuse(body, &why, text))
		kvs_link_drop(link, "refused by the prefill: %s", why.s);
	else
		return false;
	return true;
}

static bool work_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body, struct kvs_text *text)
{
	union {
		struct kvs_msg_pull pull;
		struct kvs_msg_end end;
		struct kvs_msg_fail fail;
	} msg;
	if (link->state != KVS_LINK_READY)
		return false;
	if (type == KVS_MESSAGE_PULL && kvs_get_pull(body, &msg.pull, text)) {
		kvs_flight_ask(link, &msg.pull);
		free((void *)(uintptr_t)msg.pull.src_items);
	} else if (type == KVS_MESSAGE_CANCEL && kvs_get_end(body, &msg.end, text)) {
		kvs_flight_cancel(link, msg.end.request, msg.end.text.s);
	} else if (type == KVS_MESSAGE_ROUTE_FAILED && kvs_get_end(body, &msg.end, text)) {
		kvs_flight_route_failed(link, msg.end.request, msg.end.number, msg.end.text.s);
	} else if (type == KVS_MESSAGE_FAIL && kvs_get_fail(body, &msg.fail, text)) {
		on_fail(link, &msg.fail);
	} else {
		return text->s[0] == '\0' && (kvs_rdma_message(link, type, body, text) ||
		                              (text->s[0] == '\0' && kvs_cuda_message(link, type, body, text)));
	}
	return true;
}

void kvs_decode_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body)
{
	struct kvs_text text = {.s = ""};
	if (handshake_message(link, type, body, &text))
		return;
	if (text.s[0] == '\0' && work_message(link, type, body, &text))
		return;
	if (link->name[0] == '\0')
		(void)snprintf(link->name, sizeof(link->name), "a stranger (%s)",
		               link->is_unix ? "this host" : "over TCP");
	kvs_link_drop(link, "%s", text.s[0] != '\0' ? text.s : "a message that has no place here");
}
