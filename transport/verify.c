/* SPDX-License-Identifier: Apache-2.0 */
#include "verify.h"

#include <stdlib.h>
#include <string.h>

#include "cuda_engine.h"

#define LANES  4u
#define FACTOR 0x9e3779b97f4a7c15u
#define PIECE  4096u /* of packed bytes; a multiple of the lanes' 32, so that it does not show in the digest */

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

static void add_host(struct digest *digest, const struct kvs_plan *plan, bool source)
{
	for (uint32_t c = 0; c < plan->copy_count; c++) {
		const struct kvs_copy *copy = &plan->copies[c];
		uint64_t item_stride = source ? copy->src_item_stride : copy->dst_item_stride;
		uint64_t block_stride = source ? copy->src_block_stride : copy->dst_block_stride;
		for (uint32_t p = 0; p < plan->pair_count; p++) {
			uint64_t item = source ? plan->pairs[p].src : plan->pairs[p].dst;
			uint64_t at = (source ? copy->src_base : copy->dst_base) + item * item_stride;
			for (uint64_t b = 0; b < copy->block_count; b++, at += block_stride)
				add(digest, (const uint8_t *)(uintptr_t)at, copy->block_len);
		}
	}
}

/* The other way round: the GPU gathers from a plan's sources. False: out of memory. */
static bool reverse(struct kvs_plan *plan_p, const struct kvs_plan *plan)
{
	*plan_p = *plan;
	plan_p->copies = calloc(plan->copy_count, sizeof(*plan->copies));
	plan_p->pairs = calloc(plan->pair_count, sizeof(*plan->pairs));
	if (plan_p->copies == NULL || plan_p->pairs == NULL)
		return false;
	for (uint32_t c = 0; c < plan->copy_count; c++) {
		struct kvs_copy *copy = &plan_p->copies[c];
		const struct kvs_copy *other = &plan->copies[c];
		*copy = *other;
		copy->src_tensor = other->dst_tensor;
		copy->dst_tensor = other->src_tensor;
		copy->src_base = other->dst_base;
		copy->dst_base = other->src_base;
		copy->src_item_stride = other->dst_item_stride;
		copy->dst_item_stride = other->src_item_stride;
		copy->src_block_stride = other->dst_block_stride;
		copy->dst_block_stride = other->src_block_stride;
	}
	for (uint32_t p = 0; p < plan->pair_count; p++)
		plan_p->pairs[p] = (struct kvs_item_pair){.src = plan->pairs[p].dst, .dst = plan->pairs[p].src};
	return true;
}

/* Block by block, as of host memory, so that both kinds of memory have the same digest. */
static bool add_packed(struct digest *digest, struct kvs_cuda_engine *engine, const struct kvs_plan *plan,
                       struct kvs_text *text)
{
	uint8_t bytes[PIECE];
	for (uint32_t c = 0; c < plan->copy_count; c++) {
		const struct kvs_copy *copy = &plan->copies[c];
		for (uint64_t b = 0; b < plan->pair_count * copy->block_count; b++) {
			for (uint64_t left = copy->block_len, part; left > 0; left -= part) {
				part = left < PIECE ? left : PIECE;
				if (!kvs_cuda_engine_pack(engine, bytes, part, text))
					return false;
				add(digest, bytes, part);
			}
		}
	}
	return true;
}

/* An engine of its own for each digest: the link's is at work on the plan that this one checks. */
static bool add_device(struct digest *digest, const struct kvs_plan *plan, bool source, struct kvs_cuda_gpu *gpu,
                       struct kvs_text *text)
{
	struct kvs_cuda_engine engine = {.gpu = NULL};
	struct kvs_plan reversed = {.copies = NULL};
	bool ok = source || reverse(&reversed, plan);
	if (!ok)
		kvs_text_set(text, "out of memory");
	ok = ok && kvs_cuda_engine_open(&engine, gpu, text) &&
	     kvs_cuda_engine_begin(&engine, source ? plan : &reversed, KVS_GPU_PACK, NULL, KVS_CUDA_METHOD_AUTO,
	                           text) &&
	     add_packed(digest, &engine, plan, text);
	kvs_cuda_engine_close(&engine);
	free(reversed.copies);
	free(reversed.pairs);
	return ok;
}

bool kvs_verify_digest(const struct kvs_plan *plan, enum kvs_side side, struct kvs_cuda_memory *memory,
                       uint64_t *digest_p, struct kvs_text *text)
{
	struct digest digest = {.lane = {1, 2, 3, 4}};
	bool source = side == KVS_SIDE_SOURCE;
	if (memory == NULL)
		add_host(&digest, plan, source);
	else if (plan->bytes > 0 && !add_device(&digest, plan, source, memory->gpu, text))
		return false;
	uint64_t state = digest.bytes;
	for (unsigned i = 0; i < LANES; i++)
		state = step(state, digest.lane[i]);
	*digest_p = state;
	return true;
}
