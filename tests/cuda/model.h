/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model's pools on one rank, filled so that every byte tells where it comes from: the byte oracle. It knows heads and
 * tokens, and nothing of plans.
 */
#ifndef KVS_TEST_CUDA_MODEL_H
#define KVS_TEST_CUDA_MODEL_H

#include "device.h"

#define CANARY     0xa5
#define COMPONENTS 2

struct shape {
	uint32_t layers;
	uint32_t heads;            /* in all */
	uint32_t page;             /* tokens */
	uint32_t items;            /* pages of each pool */
	uint32_t k_width, v_width; /* bytes of one head of one token */
};

struct rank {
	struct shape shape;
	uint32_t tp_size, tp_rank;
	struct block block; /* all tensors in it */
	struct kvs_layout *layout;
	size_t size;
};

uint32_t shape_local_heads(const struct shape *shape, uint32_t tp_size);

/* Allocate and describe a rank. shift: bytes by which the pools miss the alignment of their allocation. */
struct rank rank_new(const struct driver *driver, const struct shape *shape, uint32_t tp_size, uint32_t tp_rank,
                     int device, enum kvs_cuda_kind kind, uint32_t parts, size_t shift);
void rank_free(const struct driver *driver, struct rank *rank);

/* A prefill's content, or canaries. */
void rank_fill(const struct driver *driver, const struct rank *rank);
void rank_blank(const struct driver *driver, const struct rank *rank);

/*
 * Check all bytes of a decode's pools: those of the items dst[i] of each listed component are the source items src[i],
 * everything else is a canary. count 0: nothing was moved. Returns how many bytes are wrong.
 */
uint64_t rank_verify(const struct driver *driver, const struct rank *rank, const int32_t *src, const int32_t *dst,
                     const uint32_t counts[COMPONENTS]);

/* Bytes outside these items of each listed component that are no canary. */
uint64_t rank_stray(const struct driver *driver, const struct rank *rank, const int32_t *dst,
                    const uint32_t counts[COMPONENTS]);

#endif
