/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_TEST_VERBS_INTERNAL_H
#define KVS_TEST_VERBS_INTERNAL_H

#include <pthread.h>
#include <sys/types.h>

#include "double.h"
#include "transport/verbs_types.h"

#define REGIONS 8192
#define QPS     512
#define CQ_MAX  4096

/* Known to all processes. */
struct region {
	atomic_int live;
	pid_t pid;
	uint32_t key;
	int access;
	uint64_t address, length;
	uint64_t file; /* GPU memory: the file that was there when it was registered; 0: host memory */
};

struct endpoint {
	atomic_int live;
	pid_t pid;
	uint32_t number;
	_Atomic int state;
	int access;
	int answers; /* READs at a time */
};

struct world {
	struct verbs_double_shared shared;
	pthread_mutex_t lock; /* of the tables */
	uint32_t last;
	struct region regions[REGIONS];
	struct endpoint qps[QPS];
};

extern struct world *world;

struct cq {
	struct kvs_ibv_cq ibv;
	bool armed;
	uint32_t head, count;
	struct kvs_ibv_wc wcs[CQ_MAX];
};

struct channel {
	struct kvs_ibv_comp_channel ibv;
	struct cq *cq;
};

struct qp {
	struct kvs_ibv_qp ibv;
	struct endpoint *endpoint;
	uint32_t peer;
	uint32_t depth, list, outstanding;
	int asks;
};

struct work {
	struct work *next;
	struct qp *qp;
	uint64_t id, address, due_ns;
	uint32_t key;
	bool signaled;
	int count;
	struct kvs_ibv_sge list[64];
};

struct context {
	struct kvs_ibv_context ibv;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct work *first, **last;
	struct qp *busy;
	bool stop;
	bool told;
};

/* The mapping of a process that holds an address: its path, file and where in it the address is. False: none. */
bool double_find_mapping(pid_t pid, uint64_t address, char path_p[256], uint64_t *file_p, uint64_t *offset_p);
uint64_t double_now_ns(void);
void *double_engine(void *context);
int double_post_send(struct kvs_ibv_qp *ibv, struct kvs_ibv_send_wr *wr, struct kvs_ibv_send_wr **bad_p);
int double_poll_cq(struct kvs_ibv_cq *ibv, int count, struct kvs_ibv_wc *wc);
int double_req_notify_cq(struct kvs_ibv_cq *ibv, int solicited);

#endif
