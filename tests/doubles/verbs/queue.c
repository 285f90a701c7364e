/* SPDX-License-Identifier: Apache-2.0 */
/* Queue pairs, completion queues, and the thread that carries out READs in order. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum {
	LOC_PROT_ERR = 4,
	REM_INV_REQ_ERR = 9,
};

uint64_t double_now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void raise_to(atomic_int *most, int value)
{
	int seen = *most;
	while (value > seen && !atomic_compare_exchange_weak(most, &seen, value)) {
	}
}

/* ---- carrying out ---- */

static bool inside(uint32_t key, pid_t pid, uint64_t address, uint64_t length, int access)
{
	const struct region *region = &world->regions[key % REGIONS];
	return region->live && region->key == key && region->pid == pid && (region->access & access) == access &&
	       address >= region->address && address - region->address <= region->length &&
	       length <= region->length - (address - region->address);
}

/* Has the owner put other memory at this address since it was registered? A device still knows the former. */
static bool is_replaced(uint32_t key, uint64_t address)
{
	const struct region *region = &world->regions[key % REGIONS];
	uint64_t file = 0, offset;
	char path[256];
	if (region->file == 0)
		return false;
	return !double_find_mapping(region->pid, address, path, &file, &offset) || file != region->file;
}

static int execute(const struct work *work)
{
	struct iovec local[64], remote = {.iov_base = (void *)(uintptr_t)work->address};
	const struct endpoint *peer = &world->qps[work->qp->peer % QPS];
	for (int i = 0; i < work->count; i++) {
		const struct kvs_ibv_sge *sge = &work->list[i];
		if (!inside(sge->lkey, getpid(), sge->addr, sge->length, KVS_IBV_ACCESS_LOCAL_WRITE))
			return LOC_PROT_ERR;
		local[i] = (struct iovec){(void *)(uintptr_t)sge->addr, sge->length};
		remote.iov_len += sge->length;
	}
	if (!peer->live || peer->number != work->qp->peer || peer->state < KVS_IBV_QPS_RTR)
		return KVS_IBV_WC_RETRY_EXC_ERR;
	if ((peer->access & KVS_IBV_ACCESS_REMOTE_READ) == 0)
		return REM_INV_REQ_ERR;
	if (work->qp->asks > peer->answers)
		world->shared.over++;
	if (!inside(work->key, peer->pid, work->address, remote.iov_len, KVS_IBV_ACCESS_REMOTE_READ))
		return KVS_IBV_WC_REM_ACCESS_ERR;
	/* As a device would: bytes of memory that nobody sees any more, or for it, and no error. Looking takes time. */
	if (work->signaled && (is_replaced(work->key, work->address) ||
	                       (work->count > 0 && is_replaced(work->list[0].lkey, work->list[0].addr))))
		return KVS_IBV_WC_SUCCESS;
	ssize_t got = process_vm_readv(peer->pid, local, (unsigned long)work->count, &remote, 1, 0);
	if (got != (ssize_t)remote.iov_len)
		return KVS_IBV_WC_RETRY_EXC_ERR;
	world->shared.bytes += (unsigned long long)got;
	return KVS_IBV_WC_SUCCESS;
}

static void complete(struct context *context, const struct work *work, int status)
{
	struct cq *cq = (struct cq *)work->qp->ibv.send_cq;
	(void)context;
	work->qp->outstanding--;
	if (!work->signaled && status == KVS_IBV_WC_SUCCESS)
		return;
	if ((int)cq->count >= cq->ibv.cqe)
		abort(); /* an overrun, which ends a real queue */
	cq->wcs[(cq->head + cq->count++) % CQ_MAX] = (struct kvs_ibv_wc){
	        .wr_id = work->id, .status = status, .vendor_err = 0x51, .qp_num = work->qp->ibv.qp_num};
	if (cq->armed && cq->ibv.channel != NULL) {
		uint64_t one = 1;
		cq->armed = false;
		if (write(cq->ibv.channel->fd, &one, sizeof(one)) != sizeof(one))
			abort();
	}
}

static void tell_fatal(struct context *context)
{
	uint64_t one = 1;
	/* Only a device that reads: the test means the decode's. */
	if (!world->shared.fatal || context->told || context->busy == NULL)
		return;
	context->told = true;
	if (write(context->ibv.async_fd, &one, sizeof(one)) != sizeof(one))
		abort();
}

/* Until it is due, the stall is over or its queue pair is in error. The lock held. */
static void wait_for(struct context *context, const struct work *work)
{
	while (work->qp->ibv.state != KVS_IBV_QPS_ERR && (double_now_ns() < work->due_ns || world->shared.stall)) {
		struct timespec until;
		tell_fatal(context);
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += 200000;
		if (until.tv_nsec >= 1000000000) {
			until.tv_nsec -= 1000000000;
			until.tv_sec++;
		}
		pthread_cond_timedwait(&context->changed, &context->lock, &until);
	}
}

void *double_engine(void *argument)
{
	struct context *context = argument;
	pthread_mutex_lock(&context->lock);
	for (;;) {
		while (context->first == NULL && !context->stop)
			pthread_cond_wait(&context->changed, &context->lock);
		struct work *work = context->first;
		if (work == NULL)
			break;
		context->first = work->next;
		if (context->first == NULL)
			context->last = &context->first;
		context->busy = work->qp;
		wait_for(context, work);
		int status = KVS_IBV_WC_WR_FLUSH_ERR;
		if (work->qp->ibv.state == KVS_IBV_QPS_RTS) {
			int number = ++world->shared.reads;
			if (work->signaled)
				world->shared.signaled++;
			raise_to(&world->shared.longest_list, work->count);
			pthread_mutex_unlock(&context->lock);
			status = number == world->shared.fail_read ? world->shared.fail_status : execute(work);
			pthread_mutex_lock(&context->lock);
			if (number == world->shared.corrupt_read && work->count > 0)
				*(uint8_t *)(uintptr_t)work->list[work->count - 1].addr ^= 1;
			if (status != KVS_IBV_WC_SUCCESS)
				work->qp->ibv.state = KVS_IBV_QPS_ERR;
		}
		complete(context, work, status);
		context->busy = NULL;
		pthread_cond_broadcast(&context->changed);
		free(work);
	}
	pthread_mutex_unlock(&context->lock);
	return NULL;
}

/* ---- the queues ---- */

int double_post_send(struct kvs_ibv_qp *ibv, struct kvs_ibv_send_wr *wr, struct kvs_ibv_send_wr **bad_p)
{
	struct qp *qp = (struct qp *)ibv;
	struct context *context = (struct context *)ibv->context;
	int error = 0;
	pthread_mutex_lock(&context->lock);
	for (; wr != NULL && error == 0; wr = error == 0 ? wr->next : wr) {
		*bad_p = wr;
		if (qp->ibv.state != KVS_IBV_QPS_RTS &&
		    (qp->ibv.state != KVS_IBV_QPS_ERR || kvs_verbs_double.device.marker_refused))
			error = EINVAL;
		else if (qp->outstanding >= qp->depth)
			error = ENOMEM;
		else if (wr->num_sge > (int)qp->list || wr->num_sge > 64 || wr->opcode != KVS_IBV_WR_RDMA_READ)
			error = EINVAL;
		if (error != 0)
			break;
		struct work *work = calloc(1, sizeof(*work));
		if (work == NULL)
			abort();
		work->qp = qp;
		work->id = wr->wr_id;
		work->address = wr->rdma.remote_addr;
		work->key = wr->rdma.rkey;
		work->signaled = (wr->send_flags & KVS_IBV_SEND_SIGNALED) != 0;
		work->due_ns = double_now_ns() + kvs_verbs_double.device.delay_us * 1000u;
		work->count = wr->num_sge;
		if (wr->num_sge > 0)
			memcpy(work->list, wr->sg_list, (size_t)wr->num_sge * sizeof(work->list[0]));
		*context->last = work;
		context->last = &work->next;
		raise_to(&world->shared.deepest, (int)++qp->outstanding);
	}
	pthread_cond_broadcast(&context->changed);
	pthread_mutex_unlock(&context->lock);
	return error;
}

int double_poll_cq(struct kvs_ibv_cq *ibv, int count, struct kvs_ibv_wc *wc)
{
	struct cq *cq = (struct cq *)ibv;
	struct context *context = (struct context *)ibv->context;
	int got = 0;
	pthread_mutex_lock(&context->lock);
	for (; got < count && cq->count > 0; got++, cq->count--) {
		wc[got] = cq->wcs[cq->head];
		cq->head = (cq->head + 1) % CQ_MAX;
	}
	pthread_mutex_unlock(&context->lock);
	return got;
}

int double_req_notify_cq(struct kvs_ibv_cq *ibv, int solicited)
{
	struct context *context = (struct context *)ibv->context;
	(void)solicited;
	pthread_mutex_lock(&context->lock);
	((struct cq *)ibv)->armed = true;
	pthread_mutex_unlock(&context->lock);
	return 0;
}

struct kvs_ibv_comp_channel *ibv_create_comp_channel(struct kvs_ibv_context *context)
{
	struct channel *channel = calloc(1, sizeof(*channel));
	if (channel == NULL)
		return NULL;
	channel->ibv.context = context;
	channel->ibv.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	return &channel->ibv;
}

int ibv_destroy_comp_channel(struct kvs_ibv_comp_channel *channel)
{
	close(channel->fd);
	free(channel);
	return 0;
}

struct kvs_ibv_cq *ibv_create_cq(struct kvs_ibv_context *context, int size, void *user,
                                 struct kvs_ibv_comp_channel *channel, int vector)
{
	(void)user;
	(void)vector;
	if (size > kvs_verbs_double.device.max_cqe || size > CQ_MAX) {
		errno = EINVAL;
		return NULL;
	}
	struct cq *cq = calloc(1, sizeof(*cq));
	if (cq == NULL)
		return NULL;
	cq->ibv.context = context;
	cq->ibv.channel = channel;
	cq->ibv.cqe = size;
	if (channel != NULL)
		((struct channel *)channel)->cq = cq;
	return &cq->ibv;
}

int ibv_destroy_cq(struct kvs_ibv_cq *cq)
{
	free(cq);
	return 0;
}

int ibv_get_cq_event(struct kvs_ibv_comp_channel *channel, struct kvs_ibv_cq **cq_p, void **user_p)
{
	uint64_t value;
	if (read(channel->fd, &value, sizeof(value)) != sizeof(value))
		return -1;
	*cq_p = &((struct channel *)channel)->cq->ibv;
	*user_p = NULL;
	return 0;
}

void ibv_ack_cq_events(struct kvs_ibv_cq *cq, unsigned count)
{
	(void)cq;
	(void)count;
}

struct kvs_ibv_qp *ibv_create_qp(struct kvs_ibv_pd *pd, struct kvs_ibv_qp_init_attr *attr)
{
	static int made;
	const struct verbs_double_device *device = &kvs_verbs_double.device;
	if (++made == device->fail_qp) {
		errno = device->fail_qp_errno;
		return NULL;
	}
	if ((int)attr->cap.max_send_wr > device->max_qp_wr || (int)attr->cap.max_send_sge > device->max_sge) {
		errno = EINVAL;
		return NULL;
	}
	struct qp *qp = calloc(1, sizeof(*qp));
	if (qp == NULL)
		return NULL;
	pthread_mutex_lock(&world->lock);
	uint32_t i = 0;
	while (i < QPS && world->qps[i].live)
		i++;
	if (i == QPS)
		abort();
	qp->endpoint = &world->qps[i];
	qp->endpoint->pid = getpid();
	qp->endpoint->number = ++world->last << 9 | i;
	qp->endpoint->state = 0;
	qp->endpoint->live = 1;
	pthread_mutex_unlock(&world->lock);
	world->shared.queue_pairs++;
	world->shared.queue_pairs_made++;
	qp->ibv.context = pd->context;
	qp->ibv.pd = pd;
	qp->ibv.send_cq = attr->send_cq;
	qp->ibv.recv_cq = attr->recv_cq;
	qp->ibv.qp_num = qp->endpoint->number;
	qp->depth = attr->cap.max_send_wr;
	qp->list = attr->cap.max_send_sge;
	return &qp->ibv;
}

int ibv_modify_qp(struct kvs_ibv_qp *ibv, struct kvs_ibv_qp_attr *attr, int mask)
{
	struct qp *qp = (struct qp *)ibv;
	struct context *context = (struct context *)ibv->context;
	int error = 0;
	pthread_mutex_lock(&context->lock);
	if ((mask & KVS_IBV_QP_ACCESS_FLAGS) != 0) {
		qp->endpoint->access = (int)attr->qp_access_flags;
		if ((attr->qp_access_flags & KVS_IBV_ACCESS_REMOTE_WRITE) != 0)
			world->shared.write_rights++;
	}
	if ((mask & KVS_IBV_QP_MAX_DEST_RD_ATOMIC) != 0) {
		if (kvs_verbs_double.device.grant_rd_atom > 0 &&
		    attr->max_dest_rd_atomic > kvs_verbs_double.device.grant_rd_atom)
			error = ENOMEM;
		if (attr->max_dest_rd_atomic == 0 || attr->max_dest_rd_atomic > kvs_verbs_double.device.max_rd_atom)
			error = EINVAL;
		qp->endpoint->answers = attr->max_dest_rd_atomic;
	}
	if ((mask & KVS_IBV_QP_MAX_QP_RD_ATOMIC) != 0) {
		if (attr->max_rd_atomic == 0 || attr->max_rd_atomic > kvs_verbs_double.device.max_init_rd_atom)
			error = EINVAL;
		qp->asks = attr->max_rd_atomic;
		world->shared.rd_atom = attr->max_rd_atomic;
	}
	if ((mask & KVS_IBV_QP_PATH_MTU) != 0) {
		if (attr->path_mtu > kvs_verbs_double.device.mtu)
			error = EINVAL;
		world->shared.path_mtu = attr->path_mtu;
	}
	if ((mask & KVS_IBV_QP_DEST_QPN) != 0)
		qp->peer = attr->dest_qp_num;
	if (error == 0) {
		qp->ibv.state = attr->qp_state;
		qp->endpoint->state = attr->qp_state;
	}
	pthread_cond_broadcast(&context->changed);
	pthread_mutex_unlock(&context->lock);
	return error;
}

int ibv_destroy_qp(struct kvs_ibv_qp *ibv)
{
	struct qp *qp = (struct qp *)ibv;
	struct context *context = (struct context *)ibv->context;
	pthread_mutex_lock(&context->lock);
	qp->ibv.state = KVS_IBV_QPS_ERR;
	pthread_cond_broadcast(&context->changed);
	/* Not a byte lands after this. */
	while (qp->outstanding > 0)
		pthread_cond_wait(&context->changed, &context->lock);
	while (context->busy == qp)
		pthread_cond_wait(&context->changed, &context->lock);
	pthread_mutex_unlock(&context->lock);
	qp->endpoint->live = 0;
	world->shared.queue_pairs--;
	free(qp);
	return 0;
}
