/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tcp transport: the worker packs and sends over a connection of its own, the agent scatters what arrives; what
 * lies in long runs of host memory is sent from there and received straight into place. Streams follow each other
 * without framing: both ends know the length of each. A stream that ends early takes the connection with it, at both
 * ends, so nothing stale is ever read.
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
#include "tcp.h"

#define TCP_PIECE (256u << 10)
#define TCP_RUNS  64u /* places in one call */

uint64_t kvs_tcp_direct_min = 4096;

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

/* Send some of it: how many bytes, 0: none; text says why unless the request was stopped. */
static size_t send_some(struct kvs_link *link, struct kvs_request *request, struct iovec *runs, uint32_t count,
                        struct kvs_text *text)
{
	const struct msghdr msg = {.msg_iov = runs, .msg_iovlen = count};
	while (!kvs_request_stopped(request)) {
		ssize_t sent = sendmsg(link->data_fd, &msg, MSG_NOSIGNAL);
		if (sent > 0)
			return (size_t)sent;
		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
			kvs_text_set(text, "data connection: %m");
			return 0;
		}
		if (!wait_writable(link, request, text))
			return 0;
	}
	return 0;
}

static bool send_all(struct kvs_link *link, struct kvs_request *request, uint8_t *data, size_t size,
                     struct kvs_text *text)
{
	while (size > 0) {
		struct iovec run = {.iov_base = data, .iov_len = size};
		size_t sent = send_some(link, request, &run, 1, text);
		if (sent == 0)
			return false;
		data += sent;
		size -= sent;
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
	bool ok = !body.failed && send_all(link, request, (uint8_t *)&header, sizeof(header), text) &&
	          send_all(link, request, body.data, body.size, text);
	free(body.data);
	return ok;
}

/* Are the runs at the cursor worth a place each? Never those in GPU memory. */
static bool is_direct(const struct kvs_link *link, const struct kvs_plan *plan, const struct kvs_cursor *cursor,
                      enum kvs_side side)
{
	if (link->endpoint->cuda != NULL || cursor->copy >= plan->copy_count)
		return false;
	/* What is left of a run may be short: its whole length counts. */
	struct kvs_cursor whole = {.copy = cursor->copy, .pair = cursor->pair};
	return kvs_copy_run(plan, &whole, side) >= kvs_tcp_direct_min;
}

/* Up to size bytes: how many, 0: none, and why is said as by send_some. */
static size_t send_piece(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_cursor *cursor,
                         uint8_t *piece, size_t size, struct kvs_text *text)
{
	if (is_direct(link, request->plan, cursor, KVS_SIDE_SOURCE)) {
		struct iovec runs[TCP_RUNS];
		uint32_t count = kvs_copy_runs(request->plan, cursor, KVS_SIDE_SOURCE, size, runs, TCP_RUNS);
		size_t sent = send_some(link, request, runs, count, text);
		kvs_copy_skip(request->plan, cursor, sent);
		return sent;
	}
	if (!kvs_linear_get(link, request->plan, stream, cursor, piece, size, text) ||
	    !send_all(link, request, piece, size, text))
		return 0;
	return size;
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
		size_t sent = send_piece(link, request, stream, &cursor, piece, size, text);
		if (sent == 0)
			break;
		left -= sent;
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
	size_t size = left < TCP_PIECE ? (size_t)left : TCP_PIECE;
	struct iovec runs[TCP_RUNS] = {{.iov_base = link->data_buffer, .iov_len = size}};
	bool direct = is_direct(link, sink->plan, &sink->cursor, KVS_SIDE_DESTINATION);
	uint32_t count = 1;
	if (direct)
		count = kvs_copy_runs(sink->plan, &sink->cursor, KVS_SIDE_DESTINATION, size, runs, TCP_RUNS);
	struct msghdr msg = {.msg_iov = runs, .msg_iovlen = count};
	ssize_t got = recvmsg(link->data_fd, &msg, 0);
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
	if (direct)
		kvs_copy_skip(sink->plan, &sink->cursor, (uint64_t)got);
	else if (!kvs_linear_put(link, sink, link->data_buffer, (size_t)got, text))
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
