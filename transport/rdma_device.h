/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The RDMA devices of this process, what it offers of them to a decode, and which pair of ports and addresses (GIDs) a
 * decode chooses. The room's lock held, but for the pure functions.
 */
#ifndef KVS_TRANSPORT_RDMA_DEVICE_H
#define KVS_TRANSPORT_RDMA_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "verbs.h"
#include "wire.h"

#define KVS_RDMA_PORTS   16
#define KVS_RDMA_DEVICES 16
#define KVS_RDMA_GIDS    8 /* per port that are worth choosing from */

struct kvs_rdma_device {
	const struct kvs_verbs *verbs;
	struct kvs_ibv_context *context;
	struct kvs_ibv_pd *pd;
	struct kvs_ibv_device_attr attr;
	char name[KVS_IBV_NAME_MAX];
	int numa;          /* node that it is attached to; -1: unknown */
	atomic_bool fatal; /* it has reported that it is gone; any thread */
};

struct kvs_rdma_gid {
	uint8_t raw[16];
	uint32_t type;  /* KVS_IBV_GID_TYPE_* */
	uint32_t index; /* in the port's table; ours only */
};

struct kvs_rdma_port {
	struct kvs_rdma_device *device; /* NULL: a peer's */
	uint32_t number;
	uint32_t link_layer;
	uint32_t lid;
	uint32_t mtu; /* KVS_IBV's code: 1 is 256 bytes, 5 is 4096 */
	uint32_t max_message;
	uint32_t rd_atom; /* READs that it answers at a time */
	uint32_t gid_count;
	struct kvs_rdma_gid gids[KVS_RDMA_GIDS];
};

/* What a peer may connect to. */
struct kvs_rdma_offer {
	uint32_t port_count;
	struct kvs_rdma_port ports[KVS_RDMA_PORTS];
	struct kvs_text why; /* there are none */
};

/* Which ports and which of their GIDs. */
struct kvs_rdma_match {
	uint32_t local_port, local_gid, remote_port, remote_gid;
};

/*
 * Open the devices at the first call and find their usable ports: active, reliable connections with READ (not iWARP),
 * with a GID. device: NULL or "name" or "name:port"; gid_index: -1 or the only one to use. The offer holds them, or why
 * there are none.
 */
void kvs_rdma_devices_open(const char *device, int gid_index, struct kvs_rdma_offer *offer_p);

/* After the last queue pair and memory region is gone. */
void kvs_rdma_devices_close(void);

/* In the child of a fork: give up the descriptors. */
void kvs_rdma_devices_forget(void);

/* An event of the device of this number is there. */
void kvs_rdma_device_event(uint64_t number);

/* The node that a numa_node file of sysfs names; -1: unknown. */
int kvs_rdma_node_in(const char *path);

/* The node of the page at this address; -1: unknown. */
int kvs_rdma_memory_node(uint64_t address);

/*
 * Choose: ports of one kind, GIDs of one type and family, RoCE v2 before v1, routable before link-local, the port
 * nearest to the memory first, then the longest common prefix. False with text. Pure.
 */
bool kvs_rdma_match(const struct kvs_rdma_offer *local, const struct kvs_rdma_offer *remote, int memory_node,
                    struct kvs_rdma_match *match_p, struct kvs_text *text);

/* On the wire; both sides pure. The reader fails on more ports or GIDs than there may be. */
void kvs_put_rdma_offer(struct kvs_writer *writer, const struct kvs_rdma_offer *offer);
void kvs_get_rdma_offer(struct kvs_reader *reader, struct kvs_rdma_offer *offer_p);

#endif
