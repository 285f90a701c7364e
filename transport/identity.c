/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* Read a small file of /proc; returns its length, NUL-terminated, or 0. */
static size_t read_file(const char *path, char *data, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t got;
	do {
		got = read(fd, data, size - 1);
	} while (got < 0 && errno == EINTR);
	close(fd);
	if (got < 0)
		got = 0;
	data[got] = '\0';
	return (size_t)got;
}

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return -1;
}

static void read_boot_id(uint8_t boot_id[KVS_BOOT_ID_SIZE])
{
	char text[64];
	memset(boot_id, 0, KVS_BOOT_ID_SIZE);
	(void)read_file("/proc/sys/kernel/random/boot_id", text, sizeof(text));
	size_t digits = 0;
	uint8_t id[KVS_BOOT_ID_SIZE] = {0};
	for (const char *c = text; *c != '\0' && digits < sizeof(id) * 2; c++) {
		int digit = hex_digit(*c);
		if (digit < 0)
			continue;
		id[digits / 2] = (uint8_t)((unsigned)id[digits / 2] << 4 | (unsigned)digit);
		digits++;
	}
	if (digits == sizeof(id) * 2)
		memcpy(boot_id, id, sizeof(id));
}

uint64_t kvs_identity_start_time(uint32_t pid)
{
	char path[64], text[1024];
	(void)snprintf(path, sizeof(path), "/proc/%" PRIu32 "/stat", pid);
	if (read_file(path, text, sizeof(text)) == 0)
		return 0;
	/* The name may hold spaces and parentheses; fields are counted from the last one. The state is field 3. */
	char *c = strrchr(text, ')');
	for (int field = 2; c != NULL && field < 22; field++)
		c = strchr(c + 1, ' ');
	return c == NULL ? 0 : strtoull(c + 1, NULL, 10);
}

void kvs_identity_self(struct kvs_identity *identity_p)
{
	struct stat st;
	memset(identity_p, 0, sizeof(*identity_p));
	read_boot_id(identity_p->boot_id);
	identity_p->pid = (uint32_t)getpid();
	identity_p->uid = (uint32_t)getuid();
	identity_p->start_time = kvs_identity_start_time(identity_p->pid);
	if (stat("/proc/self/ns/pid", &st) == 0)
		identity_p->pid_namespace = st.st_ino;
}

bool kvs_identity_same_host(const struct kvs_identity *a, const struct kvs_identity *b)
{
	static const uint8_t unknown[KVS_BOOT_ID_SIZE];
	return memcmp(a->boot_id, b->boot_id, KVS_BOOT_ID_SIZE) == 0 &&
	       memcmp(a->boot_id, unknown, KVS_BOOT_ID_SIZE) != 0;
}

bool kvs_identity_same_namespace(const struct kvs_identity *a, const struct kvs_identity *b)
{
	return kvs_identity_same_host(a, b) && a->pid_namespace == b->pid_namespace && a->pid_namespace != 0;
}

bool kvs_identity_check_socket(int fd, const struct kvs_identity *self, const struct kvs_identity *claimed,
                               struct kvs_text *text)
{
	struct ucred cred;
	socklen_t size = sizeof(cred);
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) != 0) {
		kvs_text_set(text, "the kernel does not say who is at the other end of the unix socket: %m");
		return false;
	}
	if (cred.uid != self->uid) {
		kvs_text_set(text,
		             "the other end of the unix socket runs as user %u, we as %u: run both servers as one user",
		             (unsigned)cred.uid, (unsigned)self->uid);
		return false;
	}
	if (!kvs_identity_same_namespace(self, claimed))
		return true; /* the kernel's pid says nothing about the claimed one; the key is the identity */
	if ((uint32_t)cred.pid != claimed->pid) {
		kvs_text_set(text, "process %d is at the other end of the unix socket, not %" PRIu32 " as it claims",
		             (int)cred.pid, claimed->pid);
		return false;
	}
	uint64_t start_time = kvs_identity_start_time(claimed->pid);
	if (start_time != claimed->start_time) {
		kvs_text_set(text,
		             "process %" PRIu32 " is not the one that it claims to be: it started at tick %" PRIu64
		             ", not %" PRIu64,
		             claimed->pid, start_time, claimed->start_time);
		return false;
	}
	return true;
}

bool kvs_random(void *data, size_t size)
{
	uint8_t *bytes = data;
	while (size > 0) {
		ssize_t got = getrandom(bytes, size, 0);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return false;
		bytes += got;
		size -= (size_t)got;
	}
	return true;
}
