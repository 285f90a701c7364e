/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the policy room: one component of a prefill and a decode rank under judgement, its gates passed. */
#ifndef KVS_POLICY_JUDGE_H
#define KVS_POLICY_JUDGE_H

#include "state.h"
#include "verdict.h"

#define KVS_UNPAIRED UINT32_MAX

struct kvs_case {
	const struct kvs_layout *prefill;
	const struct kvs_layout *decode;
	const struct kvs_component *src; /* NULL until both layouts are known to have the component */
	const struct kvs_component *dst;
	const struct kvs_state_row *row;
	uint32_t group;      /* g: ranks of the larger side for each rank of the smaller */
	bool decode_larger;  /* P < D */
	uint64_t src_length; /* the item lengths that a refusal names: of the tensor pair, else of the first tensors */
	uint64_t dst_length;
	struct kvs_verdict *verdict;
};

/*
 * Start a case and pass what holds for the component as a whole: sane layouts, a type that is ours on both sides, TP
 * sizes and ranks that go together, page size and dtype. False: refused.
 */
bool kvs_case_open(struct kvs_case *c, const struct kvs_layout *prefill, const struct kvs_layout *decode,
                   uint32_t component, struct kvs_verdict *verdict_p);

/* Refuse: the verdict with its text, built from the case's numbers, this cause and the remedy. Always false. */
bool kvs_case_refuse(struct kvs_case *c, enum kvs_refusal refusal, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

/* kvs_policy_pair and kvs_policy_split for an open case; indexes must be valid. */
bool kvs_case_pair(struct kvs_case *c, uint32_t *pair_p);
bool kvs_case_split(struct kvs_case *c, uint32_t src_tensor, uint32_t dst_tensor, struct kvs_split *split_p);

/*
 * Pair and split every tensor: pair_p as kvs_case_pair; split_p gets an entry for each destination tensor, marked skip
 * where nothing is moved (unpaired, held by neither side, another source's turn). Sets the verdict. False: refused.
 */
bool kvs_case_decide(struct kvs_case *c, uint32_t *pair_p, struct kvs_split *split_p);

#endif
