/* SPDX-License-Identifier: Apache-2.0 */
/* The bodies of the rdma transport's control messages. Pure; as message.h says. */
#ifndef KVS_TRANSPORT_RDMA_WIRE_H
#define KVS_TRANSPORT_RDMA_WIRE_H

#include "rdma_memory.h"
#include "wire.h"

#define KVS_RDMA_SLOT_MAX  (1u << 20) /* bytes */
#define KVS_RDMA_SLOTS_MAX 1024u

/* Decode: make a queue pair to mine. */
struct kvs_rdma_connect {
	uint64_t attempt; /* number on this link */
	uint32_t port;    /* of the prefill's offer */
	uint32_t gid;     /* of that port in the offer */
	uint32_t lid;     /* ours from here on */
	uint32_t mtu;     /* of the path */
	uint32_t rd_atom; /* READs that will be outstanding */
	uint32_t qp;
	uint32_t psn;
	uint8_t raw_gid[16];
};

/* Prefill: it is made, and this is the memory that may be read; or text, why not. */
struct kvs_rdma_ready {
	uint64_t attempt;
	uint32_t ok;
	uint32_t qp;
	uint32_t psn;
	uint32_t rd_atom; /* at most that of the connect message */
	struct kvs_text text;
	/* Slots that slices are packed into; 0: none. */
	uint32_t slot_count;
	uint32_t slot_size;
	uint64_t slots_address;
	uint32_t slots_key;
	/* Where the tensors are, component by component, and the registered pieces. */
	uint32_t tensor_count;
	uint64_t *tensors;
	struct kvs_rdma_pieces pieces;
};

/* Decode: of this stream so many pieces may be packed in all; direct: none will be asked for. */
struct kvs_rdma_credit {
	uint64_t stream;
	uint32_t direct;
	uint64_t pieces;
};

/* Prefill: so many pieces of this stream are packed. */
struct kvs_rdma_packed {
	uint64_t stream;
	uint64_t pieces;
};

void kvs_put_rdma_connect(struct kvs_writer *writer, const struct kvs_rdma_connect *msg);
void kvs_put_rdma_ready(struct kvs_writer *writer, const struct kvs_rdma_ready *msg);
void kvs_put_rdma_credit(struct kvs_writer *writer, const struct kvs_rdma_credit *msg);
void kvs_put_rdma_packed(struct kvs_writer *writer, const struct kvs_rdma_packed *msg);

bool kvs_get_rdma_connect(struct kvs_reader *reader, struct kvs_rdma_connect *msg_p, struct kvs_text *text);
/* tensors and pieces are the caller's: kvs_rdma_ready_free. */
bool kvs_get_rdma_ready(struct kvs_reader *reader, struct kvs_rdma_ready *msg_p, struct kvs_text *text);
bool kvs_get_rdma_credit(struct kvs_reader *reader, struct kvs_rdma_credit *msg_p, struct kvs_text *text);
bool kvs_get_rdma_packed(struct kvs_reader *reader, struct kvs_rdma_packed *msg_p, struct kvs_text *text);

void kvs_rdma_ready_free(struct kvs_rdma_ready *msg);

#endif
