/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tcp transport: the worker packs and sends over a connection of its own, the agent scatters what arrives. Streams
 * follow each other without framing: both ends know the length of each. A stream that ends early takes the connection
 * with it, at both ends, so nothing stale is ever read.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cuda_link.h"
#include "link.h"
#include "sock.h"

#define TCP_PIECE (256u << 10)

static bool tcp_probe(const struct kvs_link *link, struct kvs_text *reason)
{
	if (link->endpoint->record.tcp_port == 0) {
		kvs_text_set(reason, "no listening TCP port");
		return false;
	}
	return true;
}

static bool tcp_open(struct kvs_link *link, struct kvs_text *text)
{
	if (link->data_buffer == NULL)
		link->data_buffer = malloc(TCP_PIECE);
	if (link->data_buffer == NULL)
		kvs_text_set(text, "out of memory");
	return link->data_buffer != NULL && kvs_cuda_open_linear(link, text);
}

/* Wait for the socket, watching the request. False: leave; text says why unless the request was stopped. */
static bool wait_writable(struct kvs_link *link, struct kvs_request *request, struct kvs_text *text)
{
	while (!kvs_request_stopped(request)) {
		uint64_t now = kvs_now_ns();
		if (now >= request->deadline_ns) {
			kvs_text_set(text, "the data connection took nothing in time");
			return false;
		}
		struct pollfd fds[2] = {{.fd = link->data_fd, .events = POLLOUT},
		                        {.fd = link->worker_wake, .events = POLLIN}};
		int ms = (int)((request->deadline_ns - now) / 1000000) + 1;
		(void)poll(fds, 2, ms);
		kvs_event_clear(link->worker_wake);
		if (fds[0].revents != 0)
			return true;
	}
	return false;
}

static bool send_all(struct kvs_link *link, struct kvs_request *request, const uint8_t *data, size_t size,
                     struct kvs_text *text)
{
	while (size > 0) {
		if (kvs_request_stopped(request))
			return false;
		ssize_t sent = send(link->data_fd, data, size, MSG_NOSIGNAL);
		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
			if (!wait_writable(link, request, text))
				return false;
			continue;
		}
		if (sent < 0) {
			kvs_text_set(text, "data connection: %m");
			return false;
		}
		data += sent;
		size -= (size_t)sent;
	}
	return true;
}

/* Connect and say whose bytes these will be. The descriptor is in the link at once, for the sake of a fork. */
static bool connect_data(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	struct kvs_writer body = {.data = NULL};
	struct kvs_wire_header header;
	int error = 0;
	socklen_t size = sizeof(error);
	kvs_lock();
	link->data_fd = kvs_connect_tcp(&link->peer->record, kvs_config_get()->timeout_ms, text);
	struct kvs_msg_data msg = {.stream = stream};
	memcpy(msg.token, link->token, sizeof(msg.token));
	kvs_unlock();
	if (link->data_fd < 0 || !wait_writable(link, request, text))
		return false;
	if (getsockopt(link->data_fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
		errno = error != 0 ? error : errno;
		kvs_text_set(text, "data connection: %m");
		return false;
	}
	kvs_put_data(&body, &msg);
	kvs_wire_header_init(&header, KVS_MESSAGE_DATA, (uint32_t)body.size, link->peer->record.key);
	bool ok = !body.failed && send_all(link, request, (const uint8_t *)&header, sizeof(header), text) &&
	          send_all(link, request, body.data, body.size, text);
	free(body.data);
	return ok;
}

static bool tcp_send(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	struct kvs_cursor cursor = {.copy = 0};
	uint64_t left = request->plan->bytes;
	if (link->data_fd < 0 && !connect_data(link, request, stream, text))
		return false;
	uint8_t *piece = malloc(TCP_PIECE);
	if (piece == NULL) {
		kvs_text_set(text, "out of memory");
		return false;
	}
	while (left > 0) {
		size_t size = left < TCP_PIECE ? (size_t)left : TCP_PIECE;
		if (!kvs_linear_get(link, request->plan, stream, &cursor, piece, size, text) ||
		    !send_all(link, request, piece, size, text))
			break;
		left -= size;
	}
	free(piece);
	kvs_linear_end(link);
	return left == 0;
}

static enum kvs_step tcp_pull(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text)
{
	uint64_t left = sink->plan->bytes - sink->position;
	if (link->data_fd < 0)
		return KVS_STEP_IDLE; /* not connected yet */
	ssize_t got = recv(link->data_fd, link->data_buffer, left < TCP_PIECE ? (size_t)left : TCP_PIECE, 0);
	if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
		return KVS_STEP_IDLE;
	if (got <= 0) {
		if (got == 0)
			kvs_text_set(text, "the data connection was closed after %llu of %llu bytes",
			             (unsigned long long)sink->position, (unsigned long long)sink->plan->bytes);
		else
			kvs_text_set(text, "data connection: %m");
		return KVS_STEP_FAILED;
	}
	if (!kvs_linear_put(link, sink, link->data_buffer, (size_t)got, text))
		return KVS_STEP_FAILED;
	sink->position += (uint64_t)got;
	return sink->position == sink->plan->bytes ? KVS_STEP_DONE : KVS_STEP_PROGRESS;
}

static void tcp_close(struct kvs_link *link, bool ok)
{
	if (link->role == KVS_ROLE_DECODE)
		kvs_linear_end(link);
	if (ok || link->data_fd < 0)
		return;
	close(link->data_fd);
	link->data_fd = -1;
}

const struct kvs_transport_ops kvs_transport_tcp = {
        .probe = tcp_probe,
        .open = tcp_open,
        .send = tcp_send,
        .pull = tcp_pull,
        .ready = NULL,
        .wait = NULL,
        .close = tcp_close,
};
