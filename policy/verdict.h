/* SPDX-License-Identifier: Apache-2.0 */
/* The TP-mismatch policy: from the two ranks' layouts to what is to be done with one component. Pure. */
#ifndef KVS_POLICY_VERDICT_H
#define KVS_POLICY_VERDICT_H

#include "layout.h"

/* Why a component is refused. One row each: enumerator, short name (metrics, logs), what a person can do about it. */
#define KVS_REFUSAL_TABLE(X) \
	X(KVS_REFUSE_NONE, "none", "") \
	X(KVS_REFUSE_LAYOUT, "layout", "report this: one side registered memory that makes no sense") \
	X(KVS_REFUSE_COMPONENTS, "components", "run the same model with the same options on both sides") \
	X(KVS_REFUSE_TYPE, "type", "run both sides with the same tensor-parallel size") \
	X(KVS_REFUSE_TP, "tp", "make one tensor-parallel size a whole multiple of the other") \
	X(KVS_REFUSE_RANKS, "ranks", "report this: the connector paired two ranks that hold no heads in common") \
	X(KVS_REFUSE_PAGE_SIZE, "page-size", "start both sides with the same --page-size") \
	X(KVS_REFUSE_DTYPE, "dtype", "start both sides with the same --kv-cache-dtype") \
	X(KVS_REFUSE_ORDER, "order", \
	  "use the default NHD KV cache layout on both sides, K and V of each layer in buffers of their own") \
	X(KVS_REFUSE_TENSORS, "tensors", "run the same model, and the same draft model, on both sides") \
	X(KVS_REFUSE_LAYER_IDS, "layer-ids", "run both sides without pipeline parallelism") \
	X(KVS_REFUSE_LENGTHS, "lengths", "run the same model with the same options on both sides") \
	X(KVS_REFUSE_PADDED_HEADS, "padded-heads", \
	  "use at most as many ranks as KV heads on a CPU server; where its head padding is off, set " \
	  "KVSPLICE_CPU_HEADS=replicated on it") \
	X(KVS_REFUSE_INDICES, "indices", "report this: the index lists of the request do not fit the registered memory")

enum kvs_refusal {
#define X(id, name, remedy) id,
	KVS_REFUSAL_TABLE(X)
#undef X
	        KVS_REFUSAL_COUNT
};

const char *kvs_refusal_name(enum kvs_refusal refusal);   /* never NULL */
const char *kvs_refusal_remedy(enum kvs_refusal refusal); /* never NULL */

enum kvs_action {
	KVS_ACT_PASS,   /* equal TP: nothing to splice, the connector's own path is right */
	KVS_ACT_COPY,   /* every tensor pair is copied whole */
	KVS_ACT_SLICE,  /* at least one tensor pair is sliced by heads */
	KVS_ACT_SKIP,   /* another prefill rank of the group sends these bytes: report success, move nothing */
	KVS_ACT_REFUSE, /* cannot be proved right */
};

/*
 * How one tensor pair is moved. Derived from the item lengths and the TP sizes alone (P, D: attention TP sizes, r, d
 * the ranks in them): for P < D, g = D/P, n = src_item/dst_item slices, rep = g/n, slice (d % g) / rep; for P > D, g =
 * P/D, n = dst_item/src_item slots, rep = g/n, slot (r % g) / rep.
 */
struct kvs_split {
	uint32_t n;     /* slices of the source item (P < D) or slots of the destination item (P > D); 1: whole */
	uint32_t rep;   /* ranks that share one slice or slot */
	uint32_t index; /* this pair's slice or slot */
	bool skip;      /* P > D only: not the one source of its slot */
};

struct kvs_verdict {
	enum kvs_action action;
	enum kvs_refusal refusal;
	/* For KVS_ACT_REFUSE: the component, both TP sizes, the lengths, the cause, and last the remedy; else empty. */
	struct kvs_text text;
};

/*
 * Judge component (an index valid in both layouts, else KVS_REFUSE_COMPONENTS). At equal TP it is KVS_ACT_PASS whatever
 * else the layouts say, since the connector's own path makes its own checks; with splice_equal_tp it is judged, and
 * copied whole, like any other. A component of which this pair of ranks moves nothing (no tensors, none of this
 * pipeline stage's layers, another source rank's turn) is KVS_ACT_SKIP. Never fails: what is not understood is refused.
 * Any thread.
 */
void kvs_policy_judge(const struct kvs_layout *prefill, const struct kvs_layout *decode, uint32_t component,
                      bool splice_equal_tp, struct kvs_verdict *verdict_p);

/*
 * The split of one tensor pair, by the formula above; at equal TP n = rep = 1. A pair that neither rank holds (item_len
 * 0 on both sides) is whole. False: refused, verdict_p says why; a tensor that is not there is KVS_REFUSE_TENSORS. Any
 * thread.
 */
bool kvs_policy_split(const struct kvs_layout *prefill, const struct kvs_layout *decode, uint32_t component,
                      uint32_t src_tensor, uint32_t dst_tensor, struct kvs_split *split_p,
                      struct kvs_verdict *verdict_p);

/*
 * The source tensor for each destination tensor of a component, by position, or by global layer id where both sides
 * have ids and the counts differ or PP is in use. Several tensors of one layer (K and V) are paired in their order.
 * pair_p gets decode tensor_count entries (at most KVS_MAX_TENSORS), UINT32_MAX where this prefill rank (a pipeline
 * stage) does not hold the layer. A destination without a source, with no pipeline to explain it, is refused, and so is
 * a source without a destination. False: refused, verdict_p says why. Any thread.
 */
bool kvs_policy_pair(const struct kvs_layout *prefill, const struct kvs_layout *decode, uint32_t component,
                     uint32_t *pair_p, struct kvs_verdict *verdict_p);

#endif
