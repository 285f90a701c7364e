/* SPDX-License-Identifier: Apache-2.0 */
/* The prefill's end of a link: connecting, the handshake, what the decode says about pulls. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cuda_link.h"
#include "link.h"
#include "log.h"
#include "rdma.h"
#include "sha256.h"
#include "sock.h"

#define PENDING_MAX (256u << 10)
#define RETRY_NS \
	1000000000u /* after a handshake that failed: each room of that peer need not wait for the next one \
	             */

static void send_hello(struct kvs_link *link)
{
	struct kvs_writer body = {.data = NULL};
	struct kvs_msg_hello msg = {.endpoint = link->peer->record.endpoint,
	                            .has_secret = kvs_config_get()->has_secret ? 1 : 0};
	if (!kvs_random(link->nonce, sizeof(link->nonce))) {
		kvs_link_drop(link, "no random bytes: %m");
		return;
	}
	memcpy(msg.nonce, link->nonce, sizeof(msg.nonce));
	kvs_put_hello(&body, &msg);
	link->state = KVS_LINK_GREETING;
	kvs_link_send(link, KVS_MESSAGE_HELLO, &body, NULL, 0);
}

static bool begin_unix(struct kvs_link *link, struct kvs_text *text)
{
	const struct kvs_peer *peer = link->peer;
	if (!kvs_identity_same_host(&kvs_state.self, &peer->identity) || peer->record.unix_name[0] == '\0') {
		kvs_text_set(text, "on another host");
		return false;
	}
	int fd = kvs_connect_unix(&peer->record, text);
	if (fd < 0)
		return false;
	if (!kvs_identity_check_socket(fd, &kvs_state.self, &peer->identity, text)) {
		close(fd);
		return false;
	}
	link->is_unix = true;
	link->conn.fd = fd;
	send_hello(link);
	return true;
}

static bool begin_tcp(struct kvs_link *link, struct kvs_text *text)
{
	int fd = kvs_connect_tcp(&link->peer->record, kvs_config_get()->timeout_ms, text);
	if (fd < 0)
		return false;
	link->is_unix = false;
	link->conn.fd = fd;
	link->state = KVS_LINK_CONNECTING;
	link->events = EPOLLOUT;
	if (kvs_watch_add(fd, EPOLLOUT, KVS_WATCH_LINK, link->id))
		return true;
	kvs_text_set(text, "epoll: %m");
	return false;
}

static void begin(struct kvs_link *link)
{
	struct kvs_text unix_why = {.s = ""}, tcp_why = {.s = ""};
	if (begin_unix(link, &unix_why))
		return;
	kvs_log(KVS_LOG_DEBUG, "%s: no unix socket: %s", link->name, unix_why.s);
	if (!begin_tcp(link, &tcp_why))
		kvs_link_drop(link, "cannot connect: %.200s; %.200s", unix_why.s, tcp_why.s);
}

void kvs_link_connected(struct kvs_link *link)
{
	int error = 0;
	socklen_t size = sizeof(error);
	if (getsockopt(link->conn.fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
		error = errno;
	if (error != 0) {
		errno = error;
		kvs_link_drop(link, "cannot connect: %m");
		return;
	}
	send_hello(link);
}

bool kvs_link_retry(struct kvs_link *link, const char *why)
{
	struct kvs_text text;
	bool over = link->state == KVS_LINK_READY || link->state == KVS_LINK_DEAD || link->refused || !link->is_unix ||
	            link->endpoint->removed || link->peer->removed || kvs_now_ns() >= link->deadline_ns;
	if (over)
		return false;
	kvs_log(KVS_LOG_INFO, "%s: unix socket: %s; trying TCP", link->name, why);
	kvs_conn_close(&link->conn);
	kvs_conn_init(&link->conn, -1, link->peer->record.key);
	link->events = 0;
	link->drop = false;
	if (begin_tcp(link, &text))
		return true;
	kvs_text_set(&link->text, "%.200s; %.200s", why, text.s);
	return false;
}

struct kvs_link *kvs_link_open(struct kvs_endpoint *endpoint, struct kvs_peer *peer)
{
	struct kvs_link **at = &kvs_state.links;
	while (*at != NULL && ((*at)->endpoint != endpoint || (*at)->peer != peer))
		at = &(*at)->next;
	struct kvs_link *link = *at;
	if (link != NULL &&
	    (link->state != KVS_LINK_DEAD || (link->refused && kvs_now_ns() - link->dead_ns < RETRY_NS)))
		return link;
	if (link != NULL) {
		*at = link->next;
		kvs_link_unref(link);
	}
	int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (wake < 0)
		return NULL;
	link = kvs_link_new(KVS_ROLE_PREFILL, -1, peer->record.key);
	if (link == NULL) {
		close(wake);
		return NULL;
	}
	link->worker_wake = wake;
	link->endpoint = endpoint;
	endpoint->refs++;
	link->peer = peer;
	peer->refs++;
	(void)snprintf(link->name, sizeof(link->name), "%s", peer->name);
	begin(link);
	return link;
}

/* End the handshake for good, and let the other side's log say why too. */
static void refuse(struct kvs_link *link, const char *why)
{
	struct kvs_writer body = {.data = NULL};
	kvs_put_string(&body, why);
	kvs_link_send(link, KVS_MESSAGE_REFUSE, &body, NULL, 0);
	link->refused = true;
	kvs_link_drop(link, "%s", why);
}

static uint32_t allowed_transports(void)
{
	const struct kvs_config *config = kvs_config_get();
	uint32_t mask = 0;
	for (uint32_t i = 0; i < config->order_count; i++)
		mask |= kvs_transports[config->order[i]].ops != NULL ? 1U << config->order[i] : 0;
	return mask;
}

static void on_challenge(struct kvs_link *link, const struct kvs_msg_challenge *msg)
{
	const struct kvs_config *config = kvs_config_get();
	uint8_t expected[KVS_PROOF_SIZE];
	if ((msg->has_secret != 0) != config->has_secret) {
		refuse(link,
		       config->has_secret
		               ? "KVSPLICE_SECRET_FILE is set at the prefill and not at the decode: set it at both"
		               : "KVSPLICE_SECRET_FILE is set at the decode and not at the prefill: set it at both");
		return;
	}
	kvs_secret_proof("decode", link->nonce, msg->nonce, link->conn.key, expected);
	if (!kvs_equal_constant_time(expected, msg->proof, sizeof(expected))) {
		refuse(link, "the decode does not know the prefill's secret: KVSPLICE_SECRET_FILE differs");
		return;
	}
	struct kvs_writer body = {.data = NULL};
	struct kvs_msg_identity answer = {.identity = kvs_state.self,
	                                  .transports = allowed_transports(),
	                                  .device_memory = link->endpoint->device_memory,
	                                  .splice_equal_tp = config->splice_equal_tp,
	                                  .layout = link->endpoint->layout};
	link->splice_equal_tp = config->splice_equal_tp;
	kvs_rdma_offer(link, &answer.rdma);
	struct kvs_writer cuda = kvs_cuda_offer(link);
	answer.cuda = cuda.data;
	answer.cuda_size = (uint32_t)cuda.size;
	kvs_secret_proof("prefill", link->nonce, msg->nonce, link->conn.key, answer.proof);
	kvs_put_identity(&body, &answer);
	body.failed = body.failed || cuda.failed;
	free(cuda.data);
	link->state = KVS_LINK_PROVING;
	kvs_link_send(link, KVS_MESSAGE_IDENTITY, &body, NULL, 0);
}

void kvs_link_tell_failure(struct kvs_link *link, uint64_t room, uint64_t generation, const char *text)
{
	struct kvs_writer body = {.data = NULL};
	kvs_put_fail(&body, room, generation, text);
	if (link->state == KVS_LINK_READY) {
		kvs_link_send(link, KVS_MESSAGE_FAIL, &body, NULL, 0);
		return;
	}
	/* Until the handshake is over; a peer that is never reached is never told. */
	if (link->state != KVS_LINK_DEAD && link->pending.size < PENDING_MAX) {
		kvs_put_u32(&link->pending, (uint32_t)body.size);
		kvs_put_bytes(&link->pending, body.data, body.size);
	}
	free(body.data);
}

static void send_pending(struct kvs_link *link)
{
	struct kvs_reader reader = {.data = link->pending.data, .left = link->pending.size};
	while (reader.left > 0 && !link->pending.failed) {
		struct kvs_writer body = {.data = NULL};
		size_t size = kvs_get_u32(&reader);
		kvs_put_bytes(&body, reader.data, size);
		reader.data += size;
		reader.left -= size;
		kvs_link_send(link, KVS_MESSAGE_FAIL, &body, NULL, 0);
	}
	free(link->pending.data);
	link->pending = (struct kvs_writer){.data = NULL};
}

static void map_staging(struct kvs_link *link, const struct kvs_msg_welcome *msg)
{
	struct kvs_conn *conn = &link->conn;
	if (conn->in_fd_count != KVS_STAGING_FD_MAX) {
		kvs_text_set(&link->staging_text, "%u descriptors came with the staging memory, not %d",
		             conn->in_fd_count, KVS_STAGING_FD_MAX);
		return; /* what came is closed with the connection */
	}
	conn->in_fd_count = 0; /* kvs_staging_map takes them over */
	if (!kvs_staging_map(&link->staging, conn->in_fds, msg->slot_count, msg->slot_size, &link->staging_text))
		kvs_log(KVS_LOG_WARN, "%s: %s", link->name, link->staging_text.s);
}

/* Takes over msg->layout. */
static void on_welcome(struct kvs_link *link, struct kvs_msg_welcome *msg)
{
	link->peer_layout = msg->layout;
	memcpy(link->token, msg->token, sizeof(link->token));
	for (uint32_t i = 0; i < msg->route_count; i++) {
		if (msg->route[i] >= KVS_TRANSPORT_COUNT || (allowed_transports() >> msg->route[i] & 1) == 0) {
			refuse(link, "the decode chose a transport that the prefill did not offer");
			return;
		}
		if (link->route_count < KVS_TRANSPORT_COUNT)
			link->route[link->route_count++] = msg->route[i];
	}
	kvs_text_set(&link->staging_text, "the decode offered no shared staging memory");
	if (msg->slot_count > 0)
		map_staging(link, msg);
	struct kvs_text why;
	bool linear = false;
	for (uint32_t i = 0; i < link->route_count; i++)
		linear = linear || link->route[i] == KVS_TRANSPORT_HOST || link->route[i] == KVS_TRANSPORT_TCP ||
		         link->route[i] == KVS_TRANSPORT_RDMA;
	if (linear && !kvs_cuda_open_linear(link, &why))
		kvs_log(KVS_LOG_WARN, "%s: GPU memory cannot be packed: %s", link->name, why.s);
	if (!kvs_link_judge(link)) {
		kvs_link_drop(link, "out of memory");
		return;
	}
	link->state = KVS_LINK_READY;
	kvs_state.stats.links_ready++;
	kvs_stats_changed(&kvs_state.stats);
	kvs_text_set(&link->text, "%s", msg->why.s); /* until it is dead, why this route */
	kvs_log(link->route_count > 0 ? KVS_LOG_INFO : KVS_LOG_WARN, "%s: route: %s", link->name, msg->why.s);
	pthread_cond_broadcast(&kvs_state.changed);
	send_pending(link);
}

void kvs_request_wake(struct kvs_link *link, struct kvs_request *request)
{
	pthread_cond_signal(&request->cond);
	if (link->worker_wake >= 0 && link->streaming)
		kvs_event_set(link->worker_wake);
}

static struct kvs_request *find_request(struct kvs_link *link, uint64_t id)
{
	struct kvs_request *request = link->requests;
	while (request != NULL && request->id != id)
		request = request->next;
	return request; /* NULL: it has ended here meanwhile */
}

void kvs_request_abandon(struct kvs_link *link, struct kvs_request *request)
{
	if (request->sent == NULL)
		return;
	request->sent->close(link, false);
	request->sent = NULL;
}

static void end_request(struct kvs_link *link, struct kvs_request *request, bool ok, const char *text)
{
	if (request->done)
		return;
	request->done = true;
	request->ok = ok;
	kvs_text_set(&request->text, "%s", text);
	if (!ok)
		kvs_request_abandon(link, request);
	atomic_store_explicit(&request->stop, true, memory_order_release);
	kvs_request_wake(link, request);
}

void kvs_requests_end(struct kvs_link *link)
{
	for (struct kvs_request *request = link->requests; request != NULL; request = request->next) {
		struct kvs_text text;
		kvs_text_set(&text, "connection to %.150s lost: %.300s", link->name, link->text.s);
		end_request(link, request, false, text.s);
	}
}

static void on_go(struct kvs_link *link, const struct kvs_msg_go *msg)
{
	struct kvs_request *request = find_request(link, msg->request);
	if (request == NULL || request->done)
		return;
	if (msg->transport >= KVS_TRANSPORT_COUNT || kvs_transports[msg->transport].ops == NULL) {
		kvs_link_drop(link, "the decode asks for transport %u, which this build does not have", msg->transport);
		return;
	}
	request->go = true;
	request->stream = msg->stream;
	request->transport = msg->transport;
	request->bytes = msg->bytes;
	kvs_request_abandon(link, request);
	/* A worker that is still in an earlier stream of this request leaves it. */
	atomic_store_explicit(&request->stop, true, memory_order_release);
	kvs_request_wake(link, request);
}

void kvs_prefill_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body)
{
	struct kvs_text text = {.s = ""}, why;
	union {
		struct kvs_msg_challenge challenge;
		struct kvs_msg_welcome welcome;
		struct kvs_msg_go go;
		struct kvs_msg_end end;
	} msg;
	if (type == KVS_MESSAGE_REFUSE && link->state != KVS_LINK_READY && kvs_get_refuse(body, &why, &text)) {
		link->refused = true;
		kvs_link_drop(link, "refused by the decode: %s", why.s);
	} else if (type == KVS_MESSAGE_CHALLENGE && link->state == KVS_LINK_GREETING &&
	           kvs_get_challenge(body, &msg.challenge, &text)) {
		on_challenge(link, &msg.challenge);
	} else if (type == KVS_MESSAGE_WELCOME && link->state == KVS_LINK_PROVING &&
	           kvs_get_welcome(body, &msg.welcome, &text)) {
		on_welcome(link, &msg.welcome);
	} else if (type == KVS_MESSAGE_GO && link->state == KVS_LINK_READY && kvs_get_go(body, &msg.go, &text)) {
		on_go(link, &msg.go);
	} else if (type == KVS_MESSAGE_DONE && link->state == KVS_LINK_READY && kvs_get_end(body, &msg.end, &text)) {
		struct kvs_request *request = find_request(link, msg.end.request);
		if (request != NULL && !request->done)
			request->told_by_decode = true;
		if (request != NULL)
			end_request(link, request, msg.end.number == 1, msg.end.text.s);
	} else if (!kvs_rdma_message(link, type, body, &text) &&
	           (text.s[0] != '\0' || !kvs_cuda_message(link, type, body, &text))) {
		kvs_link_drop(link, "%s", text.s[0] != '\0' ? text.s : "a message that has no place here");
	}
}
