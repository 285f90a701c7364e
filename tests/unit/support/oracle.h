/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The byte oracle: what a transfer must do, worked out without the policy. An unsharded tensor [token][global head]
 * [byte] of unique values is dealt out to the prefill ranks as tensor-parallel attention does it; every rank's plans
 * are executed; then every byte of every decode rank must be what the same dealing gives it, and every byte outside the
 * listed items must still be its canary.
 */
#ifndef KVS_TEST_ORACLE_H
#define KVS_TEST_ORACLE_H

#include "policy/layout.h"

#define ORACLE_MAX_ROOMS 16

struct oracle_case {
	uint32_t prefill_tp;
	uint32_t decode_tp;
	uint32_t heads; /* of the whole model */
	uint32_t layers;
	uint32_t page_size;
	uint32_t pages;   /* in the request */
	uint32_t spare;   /* items of each tensor beside those */
	uint32_t k_width; /* bytes of one head of one token */
	uint32_t v_width; /* 0: there is no V */
	enum kvs_page_order order;
	const char *type; /* a StateType */
	bool whole;       /* every rank holds all heads */
	uint32_t rooms;   /* the pages belong to so many requests, moved at the same time piece by piece; 0: one */
	uint64_t seed;    /* of values, item lists and run limits */
};

/* Sums over all ranks. */
struct oracle_sum {
	uint64_t bytes;
	uint64_t runs;
	uint64_t copies;
	uint64_t plans;
};

/* Run one case; the running test fails, naming case and place, when a byte is wrong. */
void oracle_run(const struct oracle_case *oracle, struct oracle_sum *sum_p);

#endif
