/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "conn.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_STEP  (256u << 10)
#define UNSENT_MAX (64u << 20)

void kvs_conn_init(struct kvs_conn *conn, int fd, const uint8_t key[KVS_KEY_SIZE])
{
	memset(conn, 0, sizeof(*conn));
	conn->fd = fd;
	memcpy(conn->key, key, KVS_KEY_SIZE);
}

static void close_fds(int *fds, uint32_t *count)
{
	for (uint32_t i = 0; i < *count; i++) {
		if (fds[i] >= 0)
			close(fds[i]);
	}
	*count = 0;
}

void kvs_conn_close(struct kvs_conn *conn)
{
	if (conn->fd >= 0)
		close(conn->fd);
	close_fds(conn->in_fds, &conn->in_fd_count);
	close_fds(conn->out_fds, &conn->out_fd_count);
	free(conn->in);
	free(conn->out);
	conn->in = NULL;
	conn->out = NULL;
	conn->in_size = conn->in_capacity = 0;
	conn->out_size = conn->out_sent = conn->out_capacity = 0;
	conn->fd = -1;
}

/* How much more belongs to the message that is arriving. */
static size_t missing(const struct kvs_conn *conn)
{
	struct kvs_wire_header header;
	if (conn->in_size < sizeof(header))
		return sizeof(header) - conn->in_size;
	memcpy(&header, conn->in, sizeof(header));
	/* A senseless header is refused by kvs_conn_next before its length is believed. */
	if (!kvs_wire_header_check(&header, conn->key, NULL))
		return 0;
	return sizeof(header) + header.length - conn->in_size;
}

static void keep_fds(struct kvs_conn *conn, struct msghdr *msg)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c != NULL; c = CMSG_NXTHDR(msg, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < count; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
			if (conn->in_fd_count < KVS_CONN_FD_MAX)
				conn->in_fds[conn->in_fd_count++] = fd;
			else
				close(fd);
		}
	}
}

static bool reserve(uint8_t **data, size_t *capacity, size_t size, struct kvs_text *text)
{
	if (size <= *capacity)
		return true;
	size_t grown_to = *capacity * 2 > size ? *capacity * 2 : size;
	uint8_t *grown = realloc(*data, grown_to);
	if (grown == NULL) {
		kvs_text_set(text, "out of memory for %zu bytes of messages", grown_to);
		return false;
	}
	*data = grown;
	*capacity = grown_to;
	return true;
}

bool kvs_conn_read(struct kvs_conn *conn, struct kvs_text *text)
{
	for (;;) {
		size_t want = missing(conn);
		if (want == 0)
			return true;
		if (want > READ_STEP)
			want = READ_STEP;
		if (!reserve(&conn->in, &conn->in_capacity, conn->in_size + want, text))
			return false;
		_Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * KVS_CONN_FD_MAX)];
		struct iovec iov = {.iov_base = conn->in + conn->in_size, .iov_len = want};
		struct msghdr msg = {
		        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
		ssize_t got = recvmsg(conn->fd, &msg, MSG_CMSG_CLOEXEC);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			return true;
		if (got <= 0) {
			if (got == 0)
				kvs_text_set(text, "the other side closed the connection");
			else
				kvs_text_set(text, "control connection: %m");
			return false;
		}
		keep_fds(conn, &msg);
		conn->in_size += (size_t)got;
	}
}

enum kvs_conn_next kvs_conn_next(struct kvs_conn *conn, uint16_t *type_p, struct kvs_reader *body_p,
                                 struct kvs_text *text)
{
	struct kvs_wire_header header;
	if (conn->in_size < sizeof(header))
		return KVS_CONN_NONE;
	memcpy(&header, conn->in, sizeof(header));
	if (!kvs_wire_header_check(&header, conn->key, text))
		return KVS_CONN_BAD;
	if (conn->in_size < sizeof(header) + header.length)
		return KVS_CONN_NONE;
	*type_p = header.type;
	*body_p = (struct kvs_reader){.data = conn->in + sizeof(header), .left = header.length};
	return KVS_CONN_MESSAGE;
}

void kvs_conn_take(struct kvs_conn *conn)
{
	/* One message at a time is read, so nothing lies behind it. A long one's memory is given back. */
	conn->in_size = 0;
	if (conn->in_capacity > READ_STEP) {
		free(conn->in);
		conn->in = NULL;
		conn->in_capacity = 0;
	}
}

bool kvs_conn_unsent(const struct kvs_conn *conn)
{
	return conn->out_sent < conn->out_size;
}

static bool queue_fds(struct kvs_conn *conn, const int *fds, uint32_t fd_count, struct kvs_text *text)
{
	if (fd_count == 0)
		return true;
	if (fd_count > KVS_CONN_FD_MAX || conn->out_fd_count > 0) {
		kvs_text_set(text, "%u descriptors cannot be queued", fd_count);
		return false;
	}
	for (uint32_t i = 0; i < fd_count; i++) {
		int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 0);
		if (fd < 0) {
			kvs_text_set(text, "cannot duplicate a descriptor: %m");
			close_fds(conn->out_fds, &conn->out_fd_count);
			return false;
		}
		conn->out_fds[conn->out_fd_count++] = fd;
	}
	conn->out_fd_offset = conn->out_size;
	return true;
}

bool kvs_conn_send(struct kvs_conn *conn, uint16_t type, const struct kvs_writer *body, const int *fds,
                   uint32_t fd_count, struct kvs_text *text)
{
	struct kvs_wire_header header;
	size_t length = body == NULL ? 0 : body->size;
	if (body != NULL && body->failed) {
		kvs_text_set(text, "out of memory for a %s message", kvs_message_name(type));
		return false;
	}
	kvs_wire_header_init(&header, type, (uint32_t)length, conn->key);
	if (!kvs_wire_header_check(&header, conn->key, text))
		return false;
	if (!kvs_conn_unsent(conn))
		conn->out_size = conn->out_sent = 0;
	if (conn->out_size - conn->out_sent > UNSENT_MAX) {
		kvs_text_set(text, "the other side does not read its messages: %zu bytes unsent",
		             conn->out_size - conn->out_sent);
		return false;
	}
	if (!reserve(&conn->out, &conn->out_capacity, conn->out_size + sizeof(header) + length, text) ||
	    !queue_fds(conn, fds, fd_count, text))
		return false;
	memcpy(conn->out + conn->out_size, &header, sizeof(header));
	if (length > 0)
		memcpy(conn->out + conn->out_size + sizeof(header), body->data, length);
	conn->out_size += sizeof(header) + length;
	return kvs_conn_flush(conn, text);
}

bool kvs_conn_flush(struct kvs_conn *conn, struct kvs_text *text)
{
	while (kvs_conn_unsent(conn)) {
		_Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * KVS_CONN_FD_MAX)];
		struct iovec iov = {.iov_base = conn->out + conn->out_sent, .iov_len = conn->out_size - conn->out_sent};
		struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
		if (conn->out_fd_count > 0 && conn->out_sent < conn->out_fd_offset) {
			iov.iov_len = conn->out_fd_offset - conn->out_sent;
		} else if (conn->out_fd_count > 0) {
			memset(control, 0, sizeof(control));
			msg.msg_control = control;
			msg.msg_controllen = CMSG_SPACE(sizeof(int) * conn->out_fd_count);
			struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
			c->cmsg_level = SOL_SOCKET;
			c->cmsg_type = SCM_RIGHTS;
			c->cmsg_len = CMSG_LEN(sizeof(int) * conn->out_fd_count);
			memcpy(CMSG_DATA(c), conn->out_fds, sizeof(int) * conn->out_fd_count);
		}
		ssize_t sent = sendmsg(conn->fd, &msg, MSG_NOSIGNAL);
		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			return true;
		if (sent < 0) {
			kvs_text_set(text, "control connection: %m");
			return false;
		}
		if (msg.msg_control != NULL)
			close_fds(conn->out_fds, &conn->out_fd_count);
		conn->out_sent += (size_t)sent;
	}
	return true;
}
