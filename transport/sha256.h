/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): for the keyed challenge alone, a few hundred bytes for each peer. */
#ifndef KVS_TRANSPORT_SHA256_H
#define KVS_TRANSPORT_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVS_SHA256_SIZE 32

struct kvs_sha256 {
	uint32_t state[8];
	uint64_t length; /* bytes so far */
	uint8_t block[64];
};

void kvs_sha256_begin(struct kvs_sha256 *sha);
void kvs_sha256_add(struct kvs_sha256 *sha, const void *data, size_t size);
void kvs_sha256_end(struct kvs_sha256 *sha, uint8_t digest_p[KVS_SHA256_SIZE]);

void kvs_hmac_sha256(const void *key, size_t key_size, const void *data, size_t size,
                     uint8_t digest_p[KVS_SHA256_SIZE]);

/* Equal? In a time that does not depend on where they differ. */
bool kvs_equal_constant_time(const void *a, const void *b, size_t size);

#endif
