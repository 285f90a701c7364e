/* SPDX-License-Identifier: Apache-2.0 */
#include "sha256.h"

#include <string.h>

static const uint32_t round_constants[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, unsigned n)
{
	return x >> n | x << (32 - n);
}

static uint32_t load_be32(const uint8_t *p)
{
	return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be32(uint8_t *p, uint32_t x)
{
	p[0] = (uint8_t)(x >> 24);
	p[1] = (uint8_t)(x >> 16);
	p[2] = (uint8_t)(x >> 8);
	p[3] = (uint8_t)x;
}

static void compress(uint32_t state[8], const uint8_t block[64])
{
	uint32_t w[64], v[8];
	for (unsigned i = 0; i < 16; i++)
		w[i] = load_be32(block + (size_t)i * 4);
	for (unsigned i = 16; i < 64; i++) {
		uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
		uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
		w[i] = w[i - 16] + s0 + w[i - 7] + s1;
	}
	memcpy(v, state, sizeof(v));
	for (unsigned i = 0; i < 64; i++) {
		uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
		uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
		uint32_t t1 = v[7] + s1 + choice + round_constants[i] + w[i];
		uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
		uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
		memmove(v + 1, v, 7 * sizeof(v[0]));
		v[4] += t1;
		v[0] = t1 + s0 + majority;
	}
	for (unsigned i = 0; i < 8; i++)
		state[i] += v[i];
}

void kvs_sha256_begin(struct kvs_sha256 *sha)
{
	static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
	                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
	memset(sha, 0, sizeof(*sha));
	memcpy(sha->state, initial, sizeof(initial));
}

void kvs_sha256_add(struct kvs_sha256 *sha, const void *data, size_t size)
{
	const uint8_t *bytes = data;
	for (size_t i = 0; i < size; i++) {
		sha->block[sha->length++ % sizeof(sha->block)] = bytes[i];
		if (sha->length % sizeof(sha->block) == 0)
			compress(sha->state, sha->block);
	}
}

void kvs_sha256_end(struct kvs_sha256 *sha, uint8_t digest_p[KVS_SHA256_SIZE])
{
	static const uint8_t one = 0x80, zero = 0;
	uint64_t bits = sha->length * 8;
	uint8_t length[8];
	store_be32(length, (uint32_t)(bits >> 32));
	store_be32(length + 4, (uint32_t)bits);
	kvs_sha256_add(sha, &one, 1);
	while (sha->length % sizeof(sha->block) != sizeof(sha->block) - sizeof(length))
		kvs_sha256_add(sha, &zero, 1);
	kvs_sha256_add(sha, length, sizeof(length));
	for (unsigned i = 0; i < 8; i++)
		store_be32(digest_p + (size_t)i * 4, sha->state[i]);
}

void kvs_hmac_sha256(const void *key, size_t key_size, const void *data, size_t size, uint8_t digest_p[KVS_SHA256_SIZE])
{
	struct kvs_sha256 sha;
	uint8_t block[64] = {0}, pad[64], inner[KVS_SHA256_SIZE];
	if (key_size > sizeof(block)) {
		kvs_sha256_begin(&sha);
		kvs_sha256_add(&sha, key, key_size);
		kvs_sha256_end(&sha, block);
	} else if (key_size > 0) {
		memcpy(block, key, key_size);
	}
	for (size_t i = 0; i < sizeof(block); i++)
		pad[i] = block[i] ^ 0x36;
	kvs_sha256_begin(&sha);
	kvs_sha256_add(&sha, pad, sizeof(pad));
	kvs_sha256_add(&sha, data, size);
	kvs_sha256_end(&sha, inner);
	for (size_t i = 0; i < sizeof(block); i++)
		pad[i] = block[i] ^ 0x5c;
	kvs_sha256_begin(&sha);
	kvs_sha256_add(&sha, pad, sizeof(pad));
	kvs_sha256_add(&sha, inner, sizeof(inner));
	kvs_sha256_end(&sha, digest_p);
}

bool kvs_equal_constant_time(const void *a, const void *b, size_t size)
{
	const volatile uint8_t *x = a, *y = b;
	uint8_t difference = 0;
	for (size_t i = 0; i < size; i++)
		difference |= (uint8_t)(x[i] ^ y[i]);
	return difference == 0;
}
