/* SPDX-License-Identifier: Apache-2.0 */
/* Our own declarations of libibverbs' binary interface against its header, where that is installed. */
#include <criterion/criterion.h>

#include "transport/verbs.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

#define X(name, value) _Static_assert((int)KVS_IBV_##name == (int)IBV_##name, #name);
KVS_IBV_CONSTANTS(X)
#undef X

#define SAME_SIZE(name) _Static_assert(sizeof(struct kvs_ibv_##name) == sizeof(struct ibv_##name), #name)
#define SAME_AS(ours, theirs, name) \
	_Static_assert(offsetof(struct kvs_ibv_##ours, name) == offsetof(struct ibv_##theirs, name) && \
	                       sizeof(((struct kvs_ibv_##ours *)0)->name) == sizeof(((struct ibv_##theirs *)0)->name), \
	               #ours "." #name)
#define SAME(type, name) SAME_AS(type, type, name)

/* What we allocate ourselves must have the library's size; of the rest only the members that are read count. */
SAME_SIZE(device_attr);
SAME_SIZE(port_attr);
SAME_SIZE(gid_entry);
SAME_SIZE(qp_init_attr);
SAME_SIZE(qp_attr);
SAME_SIZE(sge);
SAME_SIZE(send_wr);
SAME_SIZE(wc);
SAME_SIZE(async_event);
SAME_SIZE(context_ops);
SAME_SIZE(device);
SAME_SIZE(mr);
SAME_SIZE(pd);
SAME_SIZE(comp_channel);
_Static_assert(sizeof(struct kvs_ibv_gid) == sizeof(union ibv_gid), "gid");

SAME(device, node_type);
SAME(device, transport_type);
SAME(device, name);
SAME(device, ibdev_path);
SAME(context, device);
SAME(context, ops);
SAME(context, async_fd);
SAME(context_ops, poll_cq);
SAME(context_ops, req_notify_cq);
SAME(context_ops, post_send);
SAME(device_attr, max_mr_size);
SAME(device_attr, max_qp_wr);
SAME(device_attr, max_sge);
SAME(device_attr, max_sge_rd);
SAME(device_attr, max_cqe);
SAME(device_attr, max_qp_rd_atom);
SAME(device_attr, max_res_rd_atom);
SAME(device_attr, max_qp_init_rd_atom);
SAME(device_attr, phys_port_cnt);
SAME(port_attr, state);
SAME(port_attr, active_mtu);
SAME(port_attr, gid_tbl_len);
SAME(port_attr, max_msg_sz);
SAME(port_attr, lid);
SAME(port_attr, link_layer);
SAME(gid_entry, gid_index);
SAME(gid_entry, gid_type);
SAME(mr, lkey);
SAME(mr, rkey);
SAME(comp_channel, fd);
SAME(cq, context);
SAME(cq, channel);
SAME(cq, cqe);
SAME(qp, context);
SAME(qp, qp_num);
SAME(qp, state);
SAME(qp_init_attr, cap);
SAME(qp_init_attr, qp_type);
SAME(qp_init_attr, sq_sig_all);
SAME(qp_attr, path_mtu);
SAME(qp_attr, rq_psn);
SAME(qp_attr, dest_qp_num);
SAME(qp_attr, qp_access_flags);
SAME(qp_attr, ah_attr);
SAME(qp_attr, max_rd_atomic);
SAME(qp_attr, max_dest_rd_atomic);
SAME(qp_attr, min_rnr_timer);
SAME(qp_attr, port_num);
SAME(qp_attr, timeout);
SAME(qp_attr, retry_cnt);
SAME(qp_attr, rnr_retry);
SAME(ah_attr, dlid);
SAME(ah_attr, sl);
SAME(ah_attr, is_global);
SAME(ah_attr, port_num);
SAME(global_route, sgid_index);
SAME(global_route, hop_limit);
SAME(global_route, traffic_class);
SAME(sge, lkey);
SAME(send_wr, sg_list);
SAME(send_wr, num_sge);
SAME(send_wr, opcode);
SAME(send_wr, send_flags);
_Static_assert(offsetof(struct kvs_ibv_send_wr, rdma.remote_addr) == offsetof(struct ibv_send_wr, wr.rdma.remote_addr),
               "remote_addr");
_Static_assert(offsetof(struct kvs_ibv_send_wr, rdma.rkey) == offsetof(struct ibv_send_wr, wr.rdma.rkey), "rkey");
SAME(wc, status);
SAME(wc, vendor_err);
SAME(wc, qp_num);
SAME(async_event, event_type);

Test(rdma_types, header)
{
	cr_assert(1, "compared by the compiler");
}
#else
Test(rdma_types, header)
{
	cr_skip("infiniband/verbs.h is not installed");
}
#endif

Test(rdma_types, library)
{
	struct kvs_text text = {.s = ""};
	const struct kvs_verbs *verbs = kvs_verbs_load(&text);
	if (verbs == NULL)
		cr_skip("%s", text.s);
	cr_expect(kvs_verbs_load(&text) == verbs);
	cr_expect_str_eq(verbs->wc_status_str(KVS_IBV_WC_SUCCESS), "success");
}
