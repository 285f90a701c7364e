/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of libibverbs' binary interface that the rdma transport uses, declared here so that nothing of it is needed
 * to build. Objects of the library are only ever seen through pointers, so a struct may end after the last member that
 * is read. tests/unit/test_rdma_types.c compares sizes, offsets and values with infiniband/verbs.h where installed.
 */
#ifndef KVS_TRANSPORT_VERBS_TYPES_H
#define KVS_TRANSPORT_VERBS_TYPES_H

#include <stddef.h>
#include <stdint.h>

/* Constant, value; the name in verbs.h is IBV_ and this. */
#define KVS_IBV_CONSTANTS(X) \
	X(TRANSPORT_IB, 0) \
	X(TRANSPORT_IWARP, 1) \
	X(LINK_LAYER_INFINIBAND, 1) \
	X(LINK_LAYER_ETHERNET, 2) \
	X(PORT_ACTIVE, 4) \
	X(GID_TYPE_IB, 0) \
	X(GID_TYPE_ROCE_V1, 1) \
	X(GID_TYPE_ROCE_V2, 2) \
	X(QPT_RC, 2) \
	X(QPS_INIT, 1) \
	X(QPS_RTR, 2) \
	X(QPS_RTS, 3) \
	X(QPS_ERR, 6) \
	X(QP_STATE, 1 << 0) \
	X(QP_ACCESS_FLAGS, 1 << 3) \
	X(QP_PKEY_INDEX, 1 << 4) \
	X(QP_PORT, 1 << 5) \
	X(QP_AV, 1 << 7) \
	X(QP_PATH_MTU, 1 << 8) \
	X(QP_TIMEOUT, 1 << 9) \
	X(QP_RETRY_CNT, 1 << 10) \
	X(QP_RNR_RETRY, 1 << 11) \
	X(QP_RQ_PSN, 1 << 12) \
	X(QP_MAX_QP_RD_ATOMIC, 1 << 13) \
	X(QP_MIN_RNR_TIMER, 1 << 15) \
	X(QP_SQ_PSN, 1 << 16) \
	X(QP_MAX_DEST_RD_ATOMIC, 1 << 17) \
	X(QP_DEST_QPN, 1 << 20) \
	X(ACCESS_LOCAL_WRITE, 1) \
	X(ACCESS_REMOTE_WRITE, 2) \
	X(ACCESS_REMOTE_READ, 4) \
	X(WR_RDMA_READ, 4) \
	X(SEND_SIGNALED, 2) \
	X(WC_SUCCESS, 0) \
	X(WC_WR_FLUSH_ERR, 5) \
	X(WC_REM_ACCESS_ERR, 10) \
	X(WC_RETRY_EXC_ERR, 12) \
	X(EVENT_DEVICE_FATAL, 8) \
	X(FORK_DISABLED, 0)

enum {
#define X(name, value) KVS_IBV_##name = (value),
	KVS_IBV_CONSTANTS(X)
#undef X
};

#define KVS_IBV_NAME_MAX 64
#define KVS_IBV_PATH_MAX 256

struct kvs_ibv_device {
	void *ops[2];
	int node_type;
	int transport_type;
	char name[KVS_IBV_NAME_MAX];
	char dev_name[KVS_IBV_NAME_MAX];
	char dev_path[KVS_IBV_PATH_MAX];
	char ibdev_path[KVS_IBV_PATH_MAX];
};

struct kvs_ibv_cq;
struct kvs_ibv_qp;
struct kvs_ibv_wc;
struct kvs_ibv_send_wr;

/* The slots of struct ibv_context_ops; the others exist for old binaries only. */
struct kvs_ibv_context_ops {
	void *before_poll_cq[11];
	int (*poll_cq)(struct kvs_ibv_cq *cq, int count, struct kvs_ibv_wc *wc);
	int (*req_notify_cq)(struct kvs_ibv_cq *cq, int solicited_only);
	void *before_post_send[12];
	int (*post_send)(struct kvs_ibv_qp *qp, struct kvs_ibv_send_wr *wr, struct kvs_ibv_send_wr **bad_p);
	void *after_post_send[6];
};

struct kvs_ibv_context {
	struct kvs_ibv_device *device;
	struct kvs_ibv_context_ops ops;
	int cmd_fd;
	int async_fd;
};

struct kvs_ibv_device_attr {
	char fw_ver[64];
	uint64_t node_guid;
	uint64_t sys_image_guid;
	uint64_t max_mr_size;
	uint64_t page_size_cap;
	uint32_t vendor_id;
	uint32_t vendor_part_id;
	uint32_t hw_ver;
	int max_qp;
	int max_qp_wr;
	unsigned device_cap_flags;
	int max_sge;
	int max_sge_rd;
	int max_cq;
	int max_cqe;
	int max_mr;
	int max_pd;
	int max_qp_rd_atom;
	int max_ee_rd_atom;
	int max_res_rd_atom;
	int max_qp_init_rd_atom;
	int unused[16];
	uint16_t max_pkeys;
	uint8_t local_ca_ack_delay;
	uint8_t phys_port_cnt;
};

struct kvs_ibv_port_attr {
	int state;
	int max_mtu;
	int active_mtu;
	int gid_tbl_len;
	uint32_t port_cap_flags;
	uint32_t max_msg_sz;
	uint32_t bad_pkey_cntr;
	uint32_t qkey_viol_cntr;
	uint16_t pkey_tbl_len;
	uint16_t lid;
	uint16_t sm_lid;
	uint8_t lmc;
	uint8_t max_vl_num;
	uint8_t sm_sl;
	uint8_t subnet_timeout;
	uint8_t init_type_reply;
	uint8_t active_width;
	uint8_t active_speed;
	uint8_t phys_state;
	uint8_t link_layer;
	uint8_t flags;
	uint16_t port_cap_flags2;
};

struct kvs_ibv_gid {
	_Alignas(uint64_t) uint8_t raw[16];
};

struct kvs_ibv_gid_entry {
	struct kvs_ibv_gid gid;
	uint32_t gid_index;
	uint32_t port_num;
	uint32_t gid_type;
	uint32_t ndev_ifindex;
};

struct kvs_ibv_pd {
	struct kvs_ibv_context *context;
	uint32_t handle;
};

struct kvs_ibv_mr {
	struct kvs_ibv_context *context;
	struct kvs_ibv_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle;
	uint32_t lkey;
	uint32_t rkey;
};

struct kvs_ibv_comp_channel {
	struct kvs_ibv_context *context;
	int fd;
	int refcnt;
};

struct kvs_ibv_cq {
	struct kvs_ibv_context *context;
	struct kvs_ibv_comp_channel *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
};

struct kvs_ibv_qp {
	struct kvs_ibv_context *context;
	void *qp_context;
	struct kvs_ibv_pd *pd;
	struct kvs_ibv_cq *send_cq;
	struct kvs_ibv_cq *recv_cq;
	void *srq;
	uint32_t handle;
	uint32_t qp_num;
	int state;
	int qp_type;
};

struct kvs_ibv_qp_cap {
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline_data;
};

struct kvs_ibv_qp_init_attr {
	void *qp_context;
	struct kvs_ibv_cq *send_cq;
	struct kvs_ibv_cq *recv_cq;
	void *srq;
	struct kvs_ibv_qp_cap cap;
	int qp_type;
	int sq_sig_all;
};

struct kvs_ibv_global_route {
	struct kvs_ibv_gid dgid;
	uint32_t flow_label;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
};

struct kvs_ibv_ah_attr {
	struct kvs_ibv_global_route grh;
	uint16_t dlid;
	uint8_t sl;
	uint8_t src_path_bits;
	uint8_t static_rate;
	uint8_t is_global;
	uint8_t port_num;
};

struct kvs_ibv_qp_attr {
	int qp_state;
	int cur_qp_state;
	int path_mtu;
	int path_mig_state;
	uint32_t qkey;
	uint32_t rq_psn;
	uint32_t sq_psn;
	uint32_t dest_qp_num;
	unsigned qp_access_flags;
	struct kvs_ibv_qp_cap cap;
	struct kvs_ibv_ah_attr ah_attr;
	struct kvs_ibv_ah_attr alt_ah_attr;
	uint16_t pkey_index;
	uint16_t alt_pkey_index;
	uint8_t en_sqd_async_notify;
	uint8_t sq_draining;
	uint8_t max_rd_atomic;
	uint8_t max_dest_rd_atomic;
	uint8_t min_rnr_timer;
	uint8_t port_num;
	uint8_t timeout;
	uint8_t retry_cnt;
	uint8_t rnr_retry;
	uint8_t alt_port_num;
	uint8_t alt_timeout;
	uint32_t rate_limit;
};

struct kvs_ibv_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

struct kvs_ibv_send_wr {
	uint64_t wr_id;
	struct kvs_ibv_send_wr *next;
	struct kvs_ibv_sge *sg_list;
	int num_sge;
	int opcode;
	unsigned send_flags;
	uint32_t imm_data;
	struct {
		uint64_t remote_addr;
		uint32_t rkey;
		uint32_t unused[4];
	} rdma;
	uint64_t unused[7];
};

struct kvs_ibv_wc {
	uint64_t wr_id;
	int status;
	int opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_data;
	uint32_t qp_num;
	uint32_t src_qp;
	unsigned wc_flags;
	uint16_t pkey_index;
	uint16_t slid;
	uint8_t sl;
	uint8_t dlid_path_bits;
};

struct kvs_ibv_async_event {
	void *element;
	int event_type;
};

#endif
