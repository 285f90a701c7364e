/* SPDX-License-Identifier: Apache-2.0 */
/* Who a process is, for peers: the same pid in two containers or after a reboot is another process. */
#ifndef KVS_TRANSPORT_IDENTITY_H
#define KVS_TRANSPORT_IDENTITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../policy/text.h"

#define KVS_BOOT_ID_SIZE 16

struct kvs_identity {
	uint8_t boot_id[KVS_BOOT_ID_SIZE]; /* all zero: not known, equal to nobody's */
	uint64_t pid_namespace;            /* inode of /proc/self/ns/pid; 0: not known */
	uint64_t start_time;               /* clock ticks since boot, field 22 of /proc/PID/stat; 0: not known */
	uint32_t pid;
	uint32_t uid;
};

/* This process, read anew (a fork changes it). Any thread. */
void kvs_identity_self(struct kvs_identity *identity_p);

/* Start time of a process in our pid namespace; 0: no such process, or not readable. Any thread. */
uint64_t kvs_identity_start_time(uint32_t pid);

bool kvs_identity_same_host(const struct kvs_identity *a, const struct kvs_identity *b);

/* Same host and same pid namespace: pids of one mean something to the other. */
bool kvs_identity_same_namespace(const struct kvs_identity *a, const struct kvs_identity *b);

/*
 * What the kernel says about who is at the other end of a unix socket: is it our user, and, where pids can be compared,
 * the process that claims to be there? False with text. Any thread.
 */
bool kvs_identity_check_socket(int fd, const struct kvs_identity *self, const struct kvs_identity *claimed,
                               struct kvs_text *text);

/* Random bytes from the kernel. False: there are none (errno). */
bool kvs_random(void *data, size_t size);

#endif
