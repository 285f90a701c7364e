/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "sock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "identity.h"

#define BACKLOG 4096 /* the kernel cuts it to net.core.somaxconn */

/* "", ":PORT" or ":FIRST-LAST". */
static bool parse_ports(const char *s, struct kvs_listen *listen_p)
{
	listen_p->first = 0;
	listen_p->last = 0;
	if (*s == '\0')
		return true;
	if (*s++ != ':' || *s < '0' || *s > '9')
		return false;
	char *end;
	unsigned long first = strtoul(s, &end, 10), last = first;
	if (*end == '-' && end[1] >= '0' && end[1] <= '9')
		last = strtoul(end + 1, &end, 10);
	if (*end != '\0' || first == 0 || last > UINT16_MAX || first > last)
		return false;
	listen_p->first = (uint16_t)first;
	listen_p->last = (uint16_t)last;
	return true;
}

static bool parse_host(const char *host, struct kvs_listen *listen_p, struct kvs_text *text)
{
	struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
	memset(&listen_p->address, 0, sizeof(listen_p->address));
	if (inet_pton(AF_INET, host, &listen_p->address.in.sin_addr) == 1) {
		listen_p->address.in.sin_family = AF_INET;
		listen_p->size = sizeof(listen_p->address.in);
		return true;
	}
	if (inet_pton(AF_INET6, host, &listen_p->address.in6.sin6_addr) == 1) {
		listen_p->address.in6.sin6_family = AF_INET6;
		listen_p->size = sizeof(listen_p->address.in6);
		return true;
	}
	int error = getaddrinfo(host, NULL, &hints, &found);
	if (error != 0 || found->ai_addrlen > sizeof(listen_p->address)) {
		kvs_text_set(text, "no address for host '%.100s': %s", host,
		             error != 0 ? gai_strerror(error) : "of no known family");
		if (error == 0)
			freeaddrinfo(found);
		return false;
	}
	memcpy(&listen_p->address, found->ai_addr, found->ai_addrlen);
	listen_p->size = found->ai_addrlen;
	freeaddrinfo(found);
	return true;
}

bool kvs_listen_parse(const char *value, struct kvs_listen *listen_p, struct kvs_text *text)
{
	char host[256];
	const char *ports;
	size_t length;
	if (value[0] == '[' && strchr(value, ']') != NULL) {
		length = (size_t)(strchr(value, ']') - value) - 1;
		ports = value + length + 2;
		value++;
	} else if (strchr(value, ':') == strrchr(value, ':')) {
		length = strcspn(value, ":");
		ports = value + length;
	} else { /* a bare IPv6 address */
		length = strlen(value);
		ports = value + length;
	}
	if (length == 0 || length >= sizeof(host) || !parse_ports(ports, listen_p)) {
		kvs_text_set(text, "'%.100s' is not ADDRESS[:FIRST-LAST] with ports from 1 to 65535", value);
		return false;
	}
	memcpy(host, value, length);
	host[length] = '\0';
	return parse_host(host, listen_p, text);
}

int kvs_listen_unix(char name_p[KVS_UNIX_SIZE], struct kvs_text *text)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	uint8_t random[16];
	if (!kvs_random(random, sizeof(random))) {
		kvs_text_set(text, "no random bytes for a socket name: %m");
		return -1;
	}
	int length = snprintf(name_p, KVS_UNIX_SIZE, "kvsplice-");
	for (size_t i = 0; i < sizeof(random); i++)
		length += snprintf(name_p + length, KVS_UNIX_SIZE - (size_t)length, "%02x", random[i]);
	memcpy(address.sun_path + 1, name_p, (size_t)length);
	socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) != 0 || listen(fd, BACKLOG) != 0) {
		kvs_text_set(text, "cannot listen on a unix socket: %m");
		if (fd >= 0)
			close(fd);
		return -1;
	}
	return fd;
}

void kvs_record_set_address(struct kvs_record *record_p, const struct kvs_listen *where)
{
	memset(record_p->tcp_address, 0, sizeof(record_p->tcp_address));
	if (where->address.sa.sa_family == AF_INET) {
		record_p->tcp_family = 4;
		memcpy(record_p->tcp_address, &where->address.in.sin_addr, 4);
	} else {
		record_p->tcp_family = 6;
		memcpy(record_p->tcp_address, &where->address.in6.sin6_addr, 16);
	}
}

bool kvs_record_address_is_any(const struct kvs_record *record)
{
	static const uint8_t any[sizeof(record->tcp_address)];
	return memcmp(record->tcp_address, any, sizeof(any)) == 0;
}

static void set_port(struct kvs_listen *where, uint16_t port)
{
	if (where->address.sa.sa_family == AF_INET)
		where->address.in.sin_port = htons(port);
	else
		where->address.in6.sin6_port = htons(port);
}

/* A socket that listens at this address and port, or -1 with errno. */
static int listen_at(const struct kvs_listen *where)
{
	int one = 1;
	int fd = socket(where->address.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -1;
	(void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, &where->address.sa, where->size) == 0 && listen(fd, BACKLOG) == 0)
		return fd;
	int saved = errno;
	close(fd);
	errno = saved;
	return -1;
}

int kvs_listen_tcp(const struct kvs_listen *where, struct kvs_record *record_p, struct kvs_text *text)
{
	struct kvs_listen bound = *where;
	for (uint32_t port = where->first; port <= where->last; port++) {
		set_port(&bound, (uint16_t)port);
		int fd = listen_at(&bound);
		if (fd < 0 && errno == EADDRINUSE)
			continue;
		bound.size = sizeof(bound.address);
		if (fd < 0 || getsockname(fd, &bound.address.sa, &bound.size) != 0) {
			char name[INET6_ADDRSTRLEN] = "";
			const void *address = where->address.sa.sa_family == AF_INET
			                              ? (const void *)&where->address.in.sin_addr
			                              : (const void *)&where->address.in6.sin6_addr;
			int saved = errno;
			(void)inet_ntop(where->address.sa.sa_family, address, name, sizeof(name));
			errno = saved;
			kvs_text_set(text,
			             "cannot listen on %s port %u: %m; set KVSPLICE_LISTEN to an address of this host",
			             name, (unsigned)port);
			if (fd >= 0)
				close(fd);
			return -1;
		}
		kvs_record_set_address(record_p, &bound);
		record_p->tcp_port = ntohs(bound.address.sa.sa_family == AF_INET ? bound.address.in.sin_port
		                                                                 : bound.address.in6.sin6_port);
		return fd;
	}
	kvs_text_set(text, "every port from %u to %u is in use; give KVSPLICE_LISTEN a wider range", where->first,
	             where->last);
	return -1;
}

int kvs_connect_unix(const struct kvs_record *record, struct kvs_text *text)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	size_t length = strnlen(record->unix_name, KVS_UNIX_SIZE - 1);
	memcpy(address.sun_path + 1, record->unix_name, length);
	socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&address, size) == 0)
		return fd;
	kvs_text_set(text, "unix socket of process %u: %m", record->pid);
	if (fd >= 0)
		close(fd);
	return -1;
}

void kvs_tcp_options(int fd, uint32_t timeout_ms)
{
	int one = 1;
	unsigned user_timeout = timeout_ms;
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	(void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
	(void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout, sizeof(user_timeout));
}

static void tcp_name(const struct kvs_record *record, char *name_p, size_t size)
{
	char address[INET6_ADDRSTRLEN] = "";
	(void)inet_ntop(record->tcp_family == 4 ? AF_INET : AF_INET6, record->tcp_address, address, sizeof(address));
	(void)snprintf(name_p, size, record->tcp_family == 4 ? "%s:%u" : "[%s]:%u", address, record->tcp_port);
}

int kvs_connect_tcp(const struct kvs_record *record, uint32_t timeout_ms, struct kvs_text *text)
{
	struct kvs_listen to;
	char name[INET6_ADDRSTRLEN + 16];
	if (record->tcp_family == 0 || record->tcp_port == 0) {
		kvs_text_set(text, "it has no TCP address");
		return -1;
	}
	memset(&to, 0, sizeof(to));
	if (record->tcp_family == 4) {
		to.address.in.sin_family = AF_INET;
		memcpy(&to.address.in.sin_addr, record->tcp_address, 4);
		to.size = sizeof(to.address.in);
	} else {
		to.address.in6.sin6_family = AF_INET6;
		memcpy(&to.address.in6.sin6_addr, record->tcp_address, 16);
		to.size = sizeof(to.address.in6);
	}
	set_port(&to, record->tcp_port);
	int fd = socket(to.address.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0) {
		kvs_tcp_options(fd, timeout_ms);
		if (connect(fd, &to.address.sa, to.size) == 0 || errno == EINPROGRESS)
			return fd;
	}
	int saved = errno;
	tcp_name(record, name, sizeof(name));
	errno = saved;
	kvs_text_set(text, "TCP to %s: %m", name);
	if (fd >= 0)
		close(fd);
	return -1;
}

void kvs_record_name(const struct kvs_record *record, char *name_p, size_t size)
{
	char address[INET6_ADDRSTRLEN + 16] = "no TCP address";
	if (record->tcp_family != 0)
		tcp_name(record, address, sizeof(address));
	(void)snprintf(name_p, size, "decode pid %u (%s)", record->pid, address);
}
