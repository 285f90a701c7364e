/* SPDX-License-Identifier: Apache-2.0 */
/* Sockets: where a decode listens, and how a prefill reaches it. All close-on-exec and non-blocking; any thread. */
#ifndef KVS_TRANSPORT_SOCK_H
#define KVS_TRANSPORT_SOCK_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "../policy/text.h"
#include "record.h"

/* ADDRESS[:FIRST-LAST], ADDRESS[:PORT], [IPV6][:...]; no ports: any free one. */
struct kvs_listen {
	union {
		struct sockaddr sa;
		struct sockaddr_in in;
		struct sockaddr_in6 in6;
	} address;
	socklen_t size;
	uint16_t first;
	uint16_t last;
};

/* Numeric addresses; a name is looked up (which may take the resolver's time). False with text. */
bool kvs_listen_parse(const char *value, struct kvs_listen *listen_p, struct kvs_text *text);

/* An abstract unix socket with a random name, which goes to name_p. -1 with text. */
int kvs_listen_unix(char name_p[KVS_UNIX_SIZE], struct kvs_text *text);

/* The first free port of the range; the record's tcp_* fields get the address and port. -1 with text. */
int kvs_listen_tcp(const struct kvs_listen *where, struct kvs_record *record_p, struct kvs_text *text);

/* Is this the address that means every interface, which no peer can connect to? */
bool kvs_record_address_is_any(const struct kvs_record *record);

/* Set the record's tcp_address and tcp_family. */
void kvs_record_set_address(struct kvs_record *record_p, const struct kvs_listen *where);

/*
 * Begin to connect to the record's unix or TCP address. Returns the socket, connected or (TCP) about to be: writable
 * tells, then SO_ERROR. -1 with text.
 */
int kvs_connect_unix(const struct kvs_record *record, struct kvs_text *text);
int kvs_connect_tcp(const struct kvs_record *record, uint32_t timeout_ms, struct kvs_text *text);

/* No small-packet delay, and an error when the peer's host is silent for timeout_ms. */
void kvs_tcp_options(int fd, uint32_t timeout_ms);

/* "pid 12 on this host" or "10.0.0.1:4567 pid 12": how a record's owner is named in messages. */
void kvs_record_name(const struct kvs_record *record, char *name_p, size_t size);

#endif
