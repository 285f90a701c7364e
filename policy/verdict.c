/* SPDX-License-Identifier: Apache-2.0 */
#include "verdict.h"

#include <string.h>

#include "judge.h"

static bool layouts_sane(struct kvs_case *c)
{
	struct kvs_text text;

	if (!c->prefill || !c->decode)
		return kvs_case_refuse(c, KVS_REFUSE_LAYOUT, "no layout of the %s", c->prefill ? "decode" : "prefill");
	if (!kvs_layout_check(c->prefill, &text))
		return kvs_case_refuse(c, KVS_REFUSE_LAYOUT, "prefill: %s", text.s);
	if (!kvs_layout_check(c->decode, &text))
		return kvs_case_refuse(c, KVS_REFUSE_LAYOUT, "decode: %s", text.s);
	return true;
}

static bool same_component(struct kvs_case *c, uint32_t component)
{
	const struct kvs_component *src;
	const struct kvs_component *dst;

	if (component >= c->prefill->component_count || component >= c->decode->component_count)
		return kvs_case_refuse(c, KVS_REFUSE_COMPONENTS,
		                       "component %u, but the prefill registered %u and the decode %u", component,
		                       c->prefill->component_count, c->decode->component_count);
	src = &c->prefill->components[component];
	dst = &c->decode->components[component];
	c->src = src;
	c->dst = dst;
	c->src_length = src->tensor_count ? src->tensors[0].item_len : 0;
	c->dst_length = dst->tensor_count ? dst->tensors[0].item_len : 0;
	if (strcmp(src->type, dst->type) != 0)
		return kvs_case_refuse(c, KVS_REFUSE_COMPONENTS, "component %u is %s on the prefill, %s on the decode",
		                       component, src->type, dst->type);
	c->row = kvs_state_find(src->type);
	if (!c->row || c->row->sharding == KVS_SHARD_OTHER)
		return kvs_case_refuse(c, KVS_REFUSE_TYPE, "%s, so it is left to the connector",
		                       c->row ? "this type is sharded in a way of its own" : "this type is not known");
	return true;
}

static bool tp_fits(struct kvs_case *c)
{
	uint32_t prefill_tp = c->prefill->tp_size;
	uint32_t decode_tp = c->decode->tp_size;
	uint32_t larger = prefill_tp > decode_tp ? prefill_tp : decode_tp;
	uint32_t smaller = prefill_tp > decode_tp ? decode_tp : prefill_tp;
	uint32_t larger_rank = prefill_tp > decode_tp ? c->prefill->tp_rank : c->decode->tp_rank;
	uint32_t smaller_rank = prefill_tp > decode_tp ? c->decode->tp_rank : c->prefill->tp_rank;

	if (larger % smaller)
		return kvs_case_refuse(c, KVS_REFUSE_TP, "%u is not a whole multiple of %u", larger, smaller);
	c->group = larger / smaller;
	c->decode_larger = decode_tp > prefill_tp;
	if (larger_rank / c->group != smaller_rank)
		return kvs_case_refuse(c, KVS_REFUSE_RANKS, "prefill rank %u does not serve decode rank %u",
		                       c->prefill->tp_rank, c->decode->tp_rank);
	return true;
}

static bool pools_match(struct kvs_case *c)
{
	const char *src = c->prefill->dtype;
	const char *dst = c->decode->dtype;
	bool unknown = !src[0] || !dst[0];

	if (c->prefill->page_size != c->decode->page_size)
		return kvs_case_refuse(c, KVS_REFUSE_PAGE_SIZE,
		                       "the page size is %u tokens on the prefill, %u on the decode",
		                       c->prefill->page_size, c->decode->page_size);
	/* A wider dtype looks just like fewer ranks: never infer it from the lengths. */
	if (unknown ? c->group > 1 : strcmp(src, dst) != 0)
		return kvs_case_refuse(c, KVS_REFUSE_DTYPE, "the KV cache dtype is %s on the prefill, %s on the decode",
		                       src[0] ? src : "unknown", dst[0] ? dst : "unknown");
	return true;
}

bool kvs_case_open(struct kvs_case *c, const struct kvs_layout *prefill, const struct kvs_layout *decode,
                   uint32_t component, struct kvs_verdict *verdict_p)
{
	memset(c, 0, sizeof(*c));
	c->prefill = prefill;
	c->decode = decode;
	c->verdict = verdict_p;
	memset(verdict_p, 0, sizeof(*verdict_p));
	return layouts_sane(c) && same_component(c, component) && tp_fits(c) && pools_match(c);
}

static const char *order_name(enum kvs_page_order order)
{
	switch (order) {
	case KVS_ORDER_NHD:
		return "NHD";
	case KVS_ORDER_HND:
		return "HND";
	case KVS_ORDER_UNKNOWN:
		break;
	}
	return "unknown";
}

/* What slicing and replication by heads takes beyond lengths that divide. */
static bool heads_fit(struct kvs_case *c, const struct kvs_split *split)
{
	enum kvs_page_order src = c->src->order;
	enum kvs_page_order dst = c->dst->order;
	bool padded = c->prefill->head_rule == KVS_HEADS_PADDED || c->decode->head_rule == KVS_HEADS_PADDED;

	if (src != dst || (split->n > 1 && src == KVS_ORDER_UNKNOWN))
		return kvs_case_refuse(c, KVS_REFUSE_ORDER, "the page order is %s on the prefill, %s on the decode",
		                       order_name(src), order_name(dst));
	if (padded && split->rep > 1)
		return kvs_case_refuse(c, KVS_REFUSE_PADDED_HEADS,
		                       "%u ranks of the %s would share each KV head, but the %s pads with zero heads "
		                       "instead",
		                       split->rep, c->decode_larger ? "decode" : "prefill",
		                       c->prefill->head_rule == KVS_HEADS_PADDED ? "prefill" : "decode");
	/* At equal TP the lengths cannot show whether there are fewer heads than ranks, so only equal rules are safe.
	 */
	if (c->group == 1 && c->prefill->head_rule != c->decode->head_rule)
		return kvs_case_refuse(c, KVS_REFUSE_PADDED_HEADS, "only the %s pads its KV heads to its ranks",
		                       c->prefill->head_rule == KVS_HEADS_PADDED ? "prefill" : "decode");
	return true;
}

bool kvs_case_split(struct kvs_case *c, uint32_t src_tensor, uint32_t dst_tensor, struct kvs_split *split_p)
{
	uint64_t src = c->src->tensors[src_tensor].item_len;
	uint64_t dst = c->dst->tensors[dst_tensor].item_len;
	uint64_t larger = c->decode_larger ? src : dst;
	uint64_t smaller = c->decode_larger ? dst : src;
	uint32_t rank = (c->decode_larger ? c->decode->tp_rank : c->prefill->tp_rank) % c->group;
	bool as_heads = c->row->sharding == KVS_SHARD_HEADS || (src != dst && c->row->unit == KVS_ITEM_PAGE);
	uint64_t n;

	c->src_length = src;
	c->dst_length = dst;
	memset(split_p, 0, sizeof(*split_p));
	if (!src != !dst)
		return kvs_case_refuse(c, KVS_REFUSE_LENGTHS,
		                       "tensor %u of the prefill, %u of the decode: only the %s "
		                       "holds it",
		                       src_tensor, dst_tensor, src ? "prefill" : "decode");
	if (!src) {
		split_p->n = 1;
		split_p->rep = c->group;
		split_p->skip = !c->decode_larger && rank % c->group != 0;
		return true;
	}
	n = larger / smaller;
	if (larger % smaller || c->group % n || (src != dst && !as_heads))
		return kvs_case_refuse(c, KVS_REFUSE_LENGTHS,
		                       "tensor %u of the prefill, %u of the decode: the lengths do not go together "
		                       "with %u %s ranks for each %s rank",
		                       src_tensor, dst_tensor, c->group, c->decode_larger ? "decode" : "prefill",
		                       c->decode_larger ? "prefill" : "decode");
	if (as_heads && smaller % c->prefill->page_size)
		return kvs_case_refuse(c, KVS_REFUSE_LENGTHS, "%llu bytes are not divisible by the page size of %u",
		                       (unsigned long long)smaller, c->prefill->page_size);
	split_p->n = (uint32_t)n;
	split_p->rep = c->group / split_p->n;
	split_p->index = rank / split_p->rep;
	split_p->skip = !c->decode_larger && rank % split_p->rep != 0;
	return !as_heads || heads_fit(c, split_p);
}

bool kvs_case_decide(struct kvs_case *c, uint32_t *pair_p, struct kvs_split *split_p)
{
	enum kvs_action action = KVS_ACT_SKIP;
	uint32_t i;

	if (!kvs_case_pair(c, pair_p))
		return false;
	for (i = 0; i < c->dst->tensor_count; i++) {
		struct kvs_split *split = &split_p[i];

		if (pair_p[i] == KVS_UNPAIRED) {
			memset(split, 0, sizeof(*split));
			split->skip = true;
			continue;
		}
		if (!kvs_case_split(c, pair_p[i], i, split))
			return false;
		if (!c->dst->tensors[i].item_len)
			split->skip = true;
		if (split->skip)
			continue;
		if (split->n > 1)
			action = KVS_ACT_SLICE;
		else if (action == KVS_ACT_SKIP)
			action = KVS_ACT_COPY;
	}
	c->verdict->action = action;
	return true;
}

void kvs_policy_judge(const struct kvs_layout *prefill, const struct kvs_layout *decode, uint32_t component,
                      bool splice_equal_tp, struct kvs_verdict *verdict_p)
{
	struct kvs_split splits[KVS_MAX_TENSORS];
	uint32_t pairs[KVS_MAX_TENSORS];
	struct kvs_case c;

	if (prefill && decode && prefill->tp_size && prefill->tp_size == decode->tp_size && !splice_equal_tp) {
		memset(verdict_p, 0, sizeof(*verdict_p));
		verdict_p->action = KVS_ACT_PASS;
		return;
	}
	if (kvs_case_open(&c, prefill, decode, component, verdict_p))
		(void)kvs_case_decide(&c, pairs, splits);
}

bool kvs_policy_split(const struct kvs_layout *prefill, const struct kvs_layout *decode, uint32_t component,
                      uint32_t src_tensor, uint32_t dst_tensor, struct kvs_split *split_p,
                      struct kvs_verdict *verdict_p)
{
	struct kvs_case c;

	if (!kvs_case_open(&c, prefill, decode, component, verdict_p))
		return false;
	if (src_tensor >= c.src->tensor_count || dst_tensor >= c.dst->tensor_count)
		return kvs_case_refuse(&c, KVS_REFUSE_TENSORS, "tensors %u and %u, but there are %u and %u", src_tensor,
		                       dst_tensor, c.src->tensor_count, c.dst->tensor_count);
	return kvs_case_split(&c, src_tensor, dst_tensor, split_p);
}
