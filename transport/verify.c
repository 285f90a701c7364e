/* SPDX-License-Identifier: Apache-2.0 */
#include "verify.h"

#include <string.h>

#define LANES  4u
#define FACTOR 0x9e3779b97f4a7c15u

struct digest {
	uint64_t lane[LANES];
	uint64_t bytes;
};

/* One step for each word: a bijection of the state, so that no difference is ever lost within a lane. */
static inline uint64_t step(uint64_t state, uint64_t word)
{
	state = (state ^ word) * FACTOR;
	return state ^ state >> 29;
}

/* Lanes are independent, so that the multiplications overlap. */
static void add(struct digest *digest, const uint8_t *data, uint64_t length)
{
	uint64_t words[LANES];
	digest->bytes += length;
	for (; length >= sizeof(words); length -= sizeof(words), data += sizeof(words)) {
		memcpy(words, data, sizeof(words));
		for (unsigned i = 0; i < LANES; i++)
			digest->lane[i] = step(digest->lane[i], words[i]);
	}
	if (length == 0)
		return;
	memset(words, 0, sizeof(words));
	memcpy(words, data, length);
	for (unsigned i = 0; i < LANES; i++)
		digest->lane[i] = step(digest->lane[i], words[i]);
}

uint64_t kvs_verify_digest(const struct kvs_plan *plan, enum kvs_side side)
{
	struct digest digest = {.lane = {1, 2, 3, 4}};
	bool source = side == KVS_SIDE_SOURCE;
	for (uint32_t c = 0; c < plan->copy_count; c++) {
		const struct kvs_copy *copy = &plan->copies[c];
		uint64_t item_stride = source ? copy->src_item_stride : copy->dst_item_stride;
		uint64_t block_stride = source ? copy->src_block_stride : copy->dst_block_stride;
		for (uint32_t p = 0; p < plan->pair_count; p++) {
			uint64_t item = source ? plan->pairs[p].src : plan->pairs[p].dst;
			uint64_t at = (source ? copy->src_base : copy->dst_base) + item * item_stride;
			for (uint64_t b = 0; b < copy->block_count; b++, at += block_stride)
				add(&digest, (const uint8_t *)(uintptr_t)at, copy->block_len);
		}
	}
	uint64_t state = digest.bytes;
	for (unsigned i = 0; i < LANES; i++)
		state = step(state, digest.lane[i]);
	return state;
}
