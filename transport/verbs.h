/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libibverbs, opened at run time by its versioned name, its functions by their versions. What verbs.h does inline goes
 * through the context's own operations, as it does there.
 */
#ifndef KVS_TRANSPORT_VERBS_H
#define KVS_TRANSPORT_VERBS_H

#include <stdbool.h>
#include <sys/types.h>

#include "../policy/text.h"
#include "verbs_types.h"

/* Result, name without ibv_, symbol, its version, parameters. */
#define KVS_VERBS_FUNCTIONS(X) \
	X(struct kvs_ibv_device **, get_device_list, "ibv_get_device_list", "IBVERBS_1.1", (int *count_p)) \
	X(void, free_device_list, "ibv_free_device_list", "IBVERBS_1.1", (struct kvs_ibv_device * *list)) \
	X(struct kvs_ibv_context *, open_device, "ibv_open_device", "IBVERBS_1.1", (struct kvs_ibv_device * device)) \
	X(int, close_device, "ibv_close_device", "IBVERBS_1.1", (struct kvs_ibv_context * context)) \
	X(int, query_device, "ibv_query_device", "IBVERBS_1.1", \
	  (struct kvs_ibv_context * context, struct kvs_ibv_device_attr * attr_p)) \
	X(int, query_port, "ibv_query_port", "IBVERBS_1.1", \
	  (struct kvs_ibv_context * context, uint8_t port, struct kvs_ibv_port_attr * attr_p)) \
	X(int, query_gid_ex, "_ibv_query_gid_ex", "IBVERBS_1.11", \
	  (struct kvs_ibv_context * context, uint32_t port, uint32_t index, struct kvs_ibv_gid_entry * entry_p, \
	   uint32_t flags, size_t entry_size)) \
	X(struct kvs_ibv_pd *, alloc_pd, "ibv_alloc_pd", "IBVERBS_1.1", (struct kvs_ibv_context * context)) \
	X(int, dealloc_pd, "ibv_dealloc_pd", "IBVERBS_1.1", (struct kvs_ibv_pd * pd)) \
	X(struct kvs_ibv_mr *, reg_mr, "ibv_reg_mr", "IBVERBS_1.1", \
	  (struct kvs_ibv_pd * pd, void *address, size_t length, int access)) \
	X(int, dereg_mr, "ibv_dereg_mr", "IBVERBS_1.1", (struct kvs_ibv_mr * mr)) \
	X(struct kvs_ibv_comp_channel *, create_comp_channel, "ibv_create_comp_channel", "IBVERBS_1.0", \
	  (struct kvs_ibv_context * context)) \
	X(int, destroy_comp_channel, "ibv_destroy_comp_channel", "IBVERBS_1.0", \
	  (struct kvs_ibv_comp_channel * channel)) \
	X(struct kvs_ibv_cq *, create_cq, "ibv_create_cq", "IBVERBS_1.1", \
	  (struct kvs_ibv_context * context, int size, void *user, struct kvs_ibv_comp_channel *channel, int vector)) \
	X(int, destroy_cq, "ibv_destroy_cq", "IBVERBS_1.1", (struct kvs_ibv_cq * cq)) \
	X(int, get_cq_event, "ibv_get_cq_event", "IBVERBS_1.1", \
	  (struct kvs_ibv_comp_channel * channel, struct kvs_ibv_cq * *cq_p, void **user_p)) \
	X(void, ack_cq_events, "ibv_ack_cq_events", "IBVERBS_1.1", (struct kvs_ibv_cq * cq, unsigned count)) \
	X(struct kvs_ibv_qp *, create_qp, "ibv_create_qp", "IBVERBS_1.1", \
	  (struct kvs_ibv_pd * pd, struct kvs_ibv_qp_init_attr * attr)) \
	X(int, modify_qp, "ibv_modify_qp", "IBVERBS_1.1", \
	  (struct kvs_ibv_qp * qp, struct kvs_ibv_qp_attr * attr, int mask)) \
	X(int, destroy_qp, "ibv_destroy_qp", "IBVERBS_1.1", (struct kvs_ibv_qp * qp)) \
	X(int, get_async_event, "ibv_get_async_event", "IBVERBS_1.1", \
	  (struct kvs_ibv_context * context, struct kvs_ibv_async_event * event_p)) \
	X(void, ack_async_event, "ibv_ack_async_event", "IBVERBS_1.1", (struct kvs_ibv_async_event * event)) \
	X(const char *, wc_status_str, "ibv_wc_status_str", "IBVERBS_1.1", (int status))

/* The same of those that old libraries lack. */
#define KVS_VERBS_OPTIONAL(X) \
	X(int, is_fork_initialized, "ibv_is_fork_initialized", "IBVERBS_1.13", (void)) \
	X(struct kvs_ibv_mr *, reg_dmabuf_mr, "ibv_reg_dmabuf_mr", "IBVERBS_1.12", \
	  (struct kvs_ibv_pd * pd, uint64_t offset, size_t length, uint64_t address, int fd, int access))

struct kvs_verbs {
#define X(result, name, symbol, version, params) result(*name) params;
	KVS_VERBS_FUNCTIONS(X)
	KVS_VERBS_OPTIONAL(X)
#undef X
};

/*
 * The functions, loaded at the first call; NULL with text (which library or symbol is missing), and then at every later
 * call too. The library stays loaded: its providers are not made to be unloaded. One thread at a time.
 */
const struct kvs_verbs *kvs_verbs_load(struct kvs_text *text);

static inline int kvs_verbs_poll_cq(struct kvs_ibv_cq *cq, int count, struct kvs_ibv_wc *wc)
{
	return cq->context->ops.poll_cq(cq, count, wc);
}

static inline int kvs_verbs_req_notify_cq(struct kvs_ibv_cq *cq)
{
	return cq->context->ops.req_notify_cq(cq, 0);
}

static inline int kvs_verbs_post_send(struct kvs_ibv_qp *qp, struct kvs_ibv_send_wr *wr, struct kvs_ibv_send_wr **bad_p)
{
	return qp->context->ops.post_send(qp, wr, bad_p);
}

#endif
