/* SPDX-License-Identifier: Apache-2.0 */
/* One queue pair with its completion queue: made, connected, brought to rest, destroyed. */
#ifndef KVS_TRANSPORT_RDMA_PAIR_H
#define KVS_TRANSPORT_RDMA_PAIR_H

#include "rdma_device.h"

#define KVS_RDMA_DEPTH   128u /* work requests; devices may allow less */
#define KVS_RDMA_SGE_MAX 32u

struct kvs_rdma_pair {
	struct kvs_rdma_device *device;
	struct kvs_ibv_comp_channel *channel; /* decode only */
	struct kvs_ibv_cq *cq;
	struct kvs_ibv_qp *qp; /* NULL: destroyed already */
	uint32_t depth;
	uint32_t sge;
	uint32_t psn; /* ours, at the start */
};

/* How to reach the other end. */
struct kvs_rdma_path {
	const struct kvs_rdma_port *port; /* ours */
	uint32_t gid;                     /* of that port */
	uint32_t lid;                     /* the peer's from here on */
	const uint8_t *raw_gid;
	uint32_t qp;
	uint32_t psn;
	uint32_t mtu;
	uint32_t rd_atom;
	uint8_t service_level;
	uint8_t traffic_class;
};

/* reader: the decode's, which issues READs. In state INIT. False with text, and nothing stays. No lock held. */
bool kvs_rdma_pair_make(struct kvs_rdma_pair *pair_p, const struct kvs_rdma_port *port, bool reader,
                        struct kvs_text *text);

/*
 * To RTR, and a reader to RTS. A device that has no room for so many READs is asked for one; path->rd_atom is then what
 * was granted. False with text.
 */
bool kvs_rdma_pair_connect(struct kvs_rdma_pair *pair, struct kvs_rdma_path *path, bool reader, struct kvs_text *text);

/*
 * Nothing that was posted touches memory after this has returned: error state, completions drained; a pair that does
 * not drain in time is destroyed, which is the device's own promise.
 */
void kvs_rdma_pair_quiesce(struct kvs_rdma_pair *pair);

/* Zeroed pairs are accepted. */
void kvs_rdma_pair_destroy(struct kvs_rdma_pair *pair);

#endif
