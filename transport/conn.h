/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One non-blocking socket that carries framed messages both ways. Its user holds the room's lock around every call.
 * Memory grows with what has arrived, never with what a header announces.
 */
#ifndef KVS_TRANSPORT_CONN_H
#define KVS_TRANSPORT_CONN_H

#include "wire.h"

#define KVS_CONN_FD_MAX 16

struct kvs_conn {
	int fd; /* -1: closed */
	uint8_t key[KVS_KEY_SIZE];
	uint8_t *in;
	size_t in_size, in_capacity;
	uint8_t *out;
	size_t out_size, out_sent, out_capacity;
	int in_fds[KVS_CONN_FD_MAX]; /* received, not yet taken */
	uint32_t in_fd_count;
	int out_fds[KVS_CONN_FD_MAX]; /* duplicates of ours, to go with the byte at out_fd_offset */
	uint32_t out_fd_count;
	size_t out_fd_offset;
};

void kvs_conn_init(struct kvs_conn *conn, int fd, const uint8_t key[KVS_KEY_SIZE]);

/* Close the socket and all that is held; conn->fd is -1 afterwards. Idempotent. */
void kvs_conn_close(struct kvs_conn *conn);

/* Read to the end of the message that is arriving and no further. False with text: closed by the peer, or an error. */
bool kvs_conn_read(struct kvs_conn *conn, struct kvs_text *text);

enum kvs_conn_next {
	KVS_CONN_NONE, /* nothing complete yet */
	KVS_CONN_MESSAGE,
	KVS_CONN_BAD, /* text says why; close it */
};

/* The message that has arrived: its type and body, valid until kvs_conn_take. */
enum kvs_conn_next kvs_conn_next(struct kvs_conn *conn, uint16_t *type_p, struct kvs_reader *body_p,
                                 struct kvs_text *text);
void kvs_conn_take(struct kvs_conn *conn);

/*
 * Queue a message and send what the socket takes. fds are duplicated. body may be NULL for none. False with text: out
 * of memory, too much unsent, or the socket's error.
 */
bool kvs_conn_send(struct kvs_conn *conn, uint16_t type, const struct kvs_writer *body, const int *fds,
                   uint32_t fd_count, struct kvs_text *text);

/* Send more of what is queued. False with text: the socket's error. */
bool kvs_conn_flush(struct kvs_conn *conn, struct kvs_text *text);

bool kvs_conn_unsent(const struct kvs_conn *conn);

#endif
