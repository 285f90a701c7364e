/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The endpoint record: the bytes that a decode adds to its registration message. It says where to connect and with
 * which key, nothing more; everything else is said on the control connection.
 */
#ifndef KVS_TRANSPORT_RECORD_H
#define KVS_TRANSPORT_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../policy/text.h"
#include "agent.h"
#include "identity.h"

#define KVS_KEY_SIZE     16
#define KVS_UNIX_SIZE    64
#define KVS_RECORD_MAJOR 1 /* another one: a record that we cannot read */
#define KVS_RECORD_MINOR 0 /* a higher one: the same fields and more behind them */

/* Host byte order of x86-64 and AArch64, little endian; the offsets are part of the format. */
struct kvs_record {
	uint8_t magic[8];
	uint16_t major;
	uint16_t minor;
	uint32_t size; /* of the whole record, at least sizeof(struct kvs_record) */
	uint8_t boot_id[KVS_BOOT_ID_SIZE];
	uint64_t pid_namespace;
	uint64_t start_time;
	uint32_t pid;
	uint32_t uid;
	uint64_t endpoint; /* the decode's number for it */
	uint8_t key[KVS_KEY_SIZE];
	char unix_name[KVS_UNIX_SIZE]; /* abstract socket, without the leading NUL, NUL-terminated; empty: none */
	uint8_t tcp_address[16];       /* IPv6, or IPv4 in the first four bytes */
	uint16_t tcp_family;           /* 4, 6, or 0: none */
	uint16_t tcp_port;
	uint32_t transports; /* bit i: transport i of KVS_TRANSPORT_TABLE is in this build and configured */
};

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the formats of this room are little endian");
_Static_assert(offsetof(struct kvs_record, major) == 8, "record");
_Static_assert(offsetof(struct kvs_record, size) == 12, "record");
_Static_assert(offsetof(struct kvs_record, boot_id) == 16, "record");
_Static_assert(offsetof(struct kvs_record, pid_namespace) == 32, "record");
_Static_assert(offsetof(struct kvs_record, start_time) == 40, "record");
_Static_assert(offsetof(struct kvs_record, pid) == 48, "record");
_Static_assert(offsetof(struct kvs_record, uid) == 52, "record");
_Static_assert(offsetof(struct kvs_record, endpoint) == 56, "record");
_Static_assert(offsetof(struct kvs_record, key) == 64, "record");
_Static_assert(offsetof(struct kvs_record, unix_name) == 80, "record");
_Static_assert(offsetof(struct kvs_record, tcp_address) == 144, "record");
_Static_assert(offsetof(struct kvs_record, tcp_family) == 160, "record");
_Static_assert(offsetof(struct kvs_record, tcp_port) == 162, "record");
_Static_assert(offsetof(struct kvs_record, transports) == 164, "record");
_Static_assert(sizeof(struct kvs_record) == 168, "record");
_Static_assert(sizeof(struct kvs_record) <= KVS_RECORD_MAX, "record");

/* Fill in magic, versions, size and identity; the rest is zero. */
void kvs_record_init(struct kvs_record *record_p, const struct kvs_identity *identity);

/* The identity that a record claims. */
void kvs_record_identity(const struct kvs_record *record, struct kvs_identity *identity_p);

/* Read a record that came from anywhere. False with text: not one, another version, cut, too long, senseless. Pure. */
bool kvs_record_decode(const void *data, size_t size, struct kvs_record *record_p, struct kvs_text *text);

#endif
