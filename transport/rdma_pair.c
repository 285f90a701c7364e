/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "rdma_pair.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>

#include "identity.h"
#include "state.h"

/* 4.096 us << 14 = 67 ms to an answer, seven times: about a second until a dead path is an error, loss is ridden out.
 */
#define ACK_TIMEOUT   14
#define RETRIES       7
#define MIN_RNR_TIMER 12
#define HOP_LIMIT     64
#define DRAIN_NS      200000000u

static uint32_t clamp(int value, uint32_t most)
{
	if (value < 1)
		return 1;
	return (uint32_t)value < most ? (uint32_t)value : most;
}

static bool make_queue(struct kvs_rdma_pair *pair, bool reader, struct kvs_text *text)
{
	const struct kvs_verbs *verbs = pair->device->verbs;
	if (reader) {
		errno = ENOMEM;
		pair->channel = verbs->create_comp_channel(pair->device->context);
		if (pair->channel == NULL) {
			kvs_text_set(text, "ibv_create_comp_channel: %m");
			return false;
		}
		int flags = fcntl(pair->channel->fd, F_GETFL);
		if (flags >= 0)
			(void)fcntl(pair->channel->fd, F_SETFL, flags | O_NONBLOCK);
	}
	/* Every request, the marker of kvs_rdma_pair_quiesce, and one to spare: an overrun ends the queue. */
	errno = ENOMEM;
	pair->cq = verbs->create_cq(pair->device->context, (int)pair->depth + 2, NULL, pair->channel, 0);
	if (pair->cq == NULL)
		kvs_text_set(text, "ibv_create_cq with %u entries: %m", pair->depth + 2);
	return pair->cq != NULL;
}

static bool make_qp(struct kvs_rdma_pair *pair, struct kvs_text *text)
{
	for (;;) {
		struct kvs_ibv_qp_init_attr init = {
		        .send_cq = pair->cq,
		        .recv_cq = pair->cq,
		        .qp_type = KVS_IBV_QPT_RC,
		        .cap = {.max_send_wr = pair->depth + 1,
		                .max_recv_wr = 1,
		                .max_send_sge = pair->sge,
		                .max_recv_sge = 1},
		};
		errno = ENOMEM;
		pair->qp = pair->device->verbs->create_qp(pair->device->pd, &init);
		if (pair->qp != NULL)
			return true;
		/* Depth and scatter list may be possible each by itself and not together. */
		if (errno != EINVAL || pair->sge == 1) {
			kvs_text_set(text, "ibv_create_qp with %u requests of %u pieces: %m", pair->depth, pair->sge);
			return false;
		}
		pair->sge /= 2;
	}
}

static bool to_init(struct kvs_rdma_pair *pair, const struct kvs_rdma_port *port, bool reader, struct kvs_text *text)
{
	struct kvs_ibv_qp_attr attr = {
	        .qp_state = KVS_IBV_QPS_INIT,
	        .port_num = (uint8_t)port->number,
	        .qp_access_flags = reader ? 0 : KVS_IBV_ACCESS_REMOTE_READ,
	};
	int error = pair->device->verbs->modify_qp(
	        pair->qp, &attr, KVS_IBV_QP_STATE | KVS_IBV_QP_PKEY_INDEX | KVS_IBV_QP_PORT | KVS_IBV_QP_ACCESS_FLAGS);
	if (error == 0)
		return true;
	kvs_text_set(text, "ibv_modify_qp to INIT: %s", strerror(error));
	return false;
}

bool kvs_rdma_pair_make(struct kvs_rdma_pair *pair_p, const struct kvs_rdma_port *port, bool reader,
                        struct kvs_text *text)
{
	const struct kvs_ibv_device_attr *attr = &port->device->attr;
	struct kvs_text why = {.s = ""};
	*pair_p = (struct kvs_rdma_pair){.device = port->device};
	/* A prefill's queue pair only answers. */
	pair_p->depth = reader ? clamp(attr->max_qp_wr - 1, KVS_RDMA_DEPTH) : 1;
	if (attr->max_cqe > 2)
		pair_p->depth = clamp(attr->max_cqe - 2, pair_p->depth);
	/* READs have a limit of their own; some devices leave it 0 and mean the other. */
	pair_p->sge = reader ? clamp(attr->max_sge_rd > 0 ? attr->max_sge_rd : attr->max_sge, KVS_RDMA_SGE_MAX) : 1;
	if (!kvs_random((uint8_t *)&pair_p->psn, sizeof(pair_p->psn)))
		pair_p->psn = (uint32_t)kvs_now_ns();
	pair_p->psn &= 0xffffff;
	if (make_queue(pair_p, reader, &why) && make_qp(pair_p, &why) && to_init(pair_p, port, reader, &why))
		return true;
	kvs_text_set(text, "%s: %.400s", port->device->name, why.s);
	kvs_rdma_pair_destroy(pair_p);
	return false;
}

static void address(const struct kvs_rdma_path *path, struct kvs_ibv_ah_attr *ah)
{
	const struct kvs_rdma_port *port = path->port;
	const struct kvs_rdma_gid *own = &port->gids[path->gid];
	bool roce = port->link_layer == KVS_IBV_LINK_LAYER_ETHERNET;
	ah->port_num = (uint8_t)port->number;
	ah->dlid = (uint16_t)path->lid;
	ah->sl = path->service_level;
	/* Within an InfiniBand subnet the LID is enough. */
	ah->is_global = roce || memcmp(own->raw, path->raw_gid, 8) != 0 ? 1 : 0;
	if (ah->is_global == 0)
		return;
	memcpy(ah->grh.dgid.raw, path->raw_gid, sizeof(ah->grh.dgid.raw));
	ah->grh.sgid_index = (uint8_t)own->index;
	ah->grh.hop_limit = HOP_LIMIT;
	ah->grh.traffic_class = path->traffic_class;
}

bool kvs_rdma_pair_connect(struct kvs_rdma_pair *pair, struct kvs_rdma_path *path, bool reader, struct kvs_text *text)
{
	const struct kvs_verbs *verbs = pair->device->verbs;
	struct kvs_ibv_qp_attr attr = {
	        .qp_state = KVS_IBV_QPS_RTR,
	        .path_mtu = (int)path->mtu,
	        .dest_qp_num = path->qp,
	        .rq_psn = path->psn,
	        .max_dest_rd_atomic = (uint8_t)(reader ? 1 : path->rd_atom),
	        .min_rnr_timer = MIN_RNR_TIMER,
	};
	address(path, &attr.ah_attr);
	int mask = KVS_IBV_QP_STATE | KVS_IBV_QP_AV | KVS_IBV_QP_PATH_MTU | KVS_IBV_QP_DEST_QPN | KVS_IBV_QP_RQ_PSN |
	           KVS_IBV_QP_MAX_DEST_RD_ATOMIC | KVS_IBV_QP_MIN_RNR_TIMER;
	int error = verbs->modify_qp(pair->qp, &attr, mask);
	if (error != 0 && attr.max_dest_rd_atomic > 1) {
		/* The device's store of outstanding READs is shared by all queue pairs. */
		attr.max_dest_rd_atomic = 1;
		path->rd_atom = 1;
		error = verbs->modify_qp(pair->qp, &attr, mask);
	}
	if (error != 0) {
		kvs_text_set(text, "%s: ibv_modify_qp to RTR (GID index %u, MTU %u): %s", pair->device->name,
		             path->port->gids[path->gid].index, 128U << path->mtu, strerror(error));
		return false;
	}
	if (!reader)
		return true;
	attr = (struct kvs_ibv_qp_attr){
	        .qp_state = KVS_IBV_QPS_RTS,
	        .sq_psn = pair->psn,
	        .timeout = ACK_TIMEOUT,
	        .retry_cnt = RETRIES,
	        .rnr_retry = RETRIES,
	        .max_rd_atomic = (uint8_t)path->rd_atom,
	};
	error = verbs->modify_qp(pair->qp, &attr,
	                         KVS_IBV_QP_STATE | KVS_IBV_QP_TIMEOUT | KVS_IBV_QP_RETRY_CNT | KVS_IBV_QP_RNR_RETRY |
	                                 KVS_IBV_QP_SQ_PSN | KVS_IBV_QP_MAX_QP_RD_ATOMIC);
	if (error == 0)
		return true;
	kvs_text_set(text, "%s: ibv_modify_qp to RTS (%u outstanding READs): %s", pair->device->name, path->rd_atom,
	             strerror(error));
	return false;
}

void kvs_rdma_pair_quiesce(struct kvs_rdma_pair *pair)
{
	if (pair->qp == NULL)
		return;
	struct kvs_ibv_qp_attr attr = {.qp_state = KVS_IBV_QPS_ERR};
	bool in_error = pair->device->verbs->modify_qp(pair->qp, &attr, KVS_IBV_QP_STATE) == 0;
	/* Behind everything else in the queue, which has one entry for it: when it is flushed, all is. */
	struct kvs_ibv_send_wr marker = {
	        .wr_id = UINT64_MAX, .opcode = KVS_IBV_WR_RDMA_READ, .send_flags = KVS_IBV_SEND_SIGNALED};
	struct kvs_ibv_send_wr *bad;
	bool marked = in_error && kvs_verbs_post_send(pair->qp, &marker, &bad) == 0;
	uint64_t end = kvs_now_ns() + DRAIN_NS;
	while (marked) {
		struct kvs_ibv_wc wc;
		int count = kvs_verbs_poll_cq(pair->cq, 1, &wc);
		if (count > 0 && wc.wr_id == UINT64_MAX)
			return;
		if (count < 0 || (count == 0 && kvs_now_ns() >= end))
			break;
		if (count == 0)
			sched_yield();
	}
	pair->device->verbs->destroy_qp(pair->qp);
	pair->qp = NULL;
}

void kvs_rdma_pair_destroy(struct kvs_rdma_pair *pair)
{
	if (pair->qp != NULL)
		pair->device->verbs->destroy_qp(pair->qp);
	if (pair->cq != NULL)
		pair->device->verbs->destroy_cq(pair->cq);
	if (pair->channel != NULL)
		pair->device->verbs->destroy_comp_channel(pair->channel);
	*pair = (struct kvs_rdma_pair){.device = NULL};
}
