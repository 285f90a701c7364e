/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bodies of the control messages. Encoders append to a writer (check writer->failed once, at the end); decoders
 * read a whole body that was copied out of the socket, and return false with text unless it is exactly one. Pure.
 */
#ifndef KVS_TRANSPORT_MESSAGE_H
#define KVS_TRANSPORT_MESSAGE_H

#include "identity.h"
#include "rdma_device.h"
#include "wire.h"

#define KVS_NONCE_SIZE     32
#define KVS_PROOF_SIZE     32
#define KVS_TOKEN_SIZE     16
#define KVS_ROUTE_MAX      8
#define KVS_STAGING_FD_MAX 3 /* memfd, data eventfd, space eventfd */

struct kvs_msg_hello {
	uint64_t endpoint;
	uint32_t has_secret;
	uint8_t nonce[KVS_NONCE_SIZE];
};

struct kvs_msg_challenge {
	uint32_t has_secret;
	uint8_t nonce[KVS_NONCE_SIZE];
	uint8_t proof[KVS_PROOF_SIZE]; /* zero without a secret */
};

struct kvs_msg_identity {
	uint8_t proof[KVS_PROOF_SIZE];
	struct kvs_identity identity;
	uint32_t transports;      /* mask of those that the prefill allows */
	uint32_t device_memory;   /* some of its memory is on a GPU */
	uint32_t splice_equal_tp; /* the prefill's policy holds for the link */
	struct kvs_rdma_offer rdma;
	const void *cuda; /* kvs_cuda_exports_put's; decoder: inside the body that was read */
	uint32_t cuda_size;
	struct kvs_layout *layout; /* decoder: owned by the caller */
};

struct kvs_msg_welcome {
	uint8_t token[KVS_TOKEN_SIZE]; /* what a data connection shows */
	uint32_t slot_count;           /* 0: no shared staging, no descriptors with this message */
	uint32_t slot_size;
	uint32_t route_count;
	uint32_t route[KVS_ROUTE_MAX]; /* transports that reach, in order */
	struct kvs_text why;           /* why these, for the log */
	struct kvs_layout *layout;     /* decoder: owned by the caller */
};

struct kvs_msg_pull {
	uint64_t request;
	uint64_t room;
	uint64_t generation;
	uint32_t prefill_rank; /* tp_rank + pp_rank * tp_size */
	uint32_t chunk;
	uint32_t component;
	uint32_t src_count;
	uint32_t dst_count;
	uint32_t verify; /* 1: digest is that of the source bytes (verify.h) */
	uint64_t digest;
	/* Decoder: one block with dst_items behind it, owned by the caller: free(src_items). */
	const int32_t *src_items;
	const int32_t *dst_items;
};

struct kvs_msg_go {
	uint64_t request;
	uint64_t stream; /* number of this attempt on this link, never used twice */
	uint64_t bytes;
	uint32_t transport;
};

/* ROUTE_FAILED (number: the stream), DONE (number: 1 for success), CANCEL (number: 0). */
struct kvs_msg_end {
	uint64_t request;
	uint64_t number;
	struct kvs_text text;
};

struct kvs_msg_fail {
	uint64_t room;
	uint64_t generation;
	struct kvs_text text;
};

struct kvs_msg_data {
	uint8_t token[KVS_TOKEN_SIZE];
	uint64_t stream; /* the first one that it carries */
};

void kvs_put_hello(struct kvs_writer *writer, const struct kvs_msg_hello *msg);
void kvs_put_challenge(struct kvs_writer *writer, const struct kvs_msg_challenge *msg);
void kvs_put_identity(struct kvs_writer *writer, const struct kvs_msg_identity *msg);
void kvs_put_welcome(struct kvs_writer *writer, const struct kvs_msg_welcome *msg);
void kvs_put_pull(struct kvs_writer *writer, const struct kvs_msg_pull *msg);
void kvs_put_go(struct kvs_writer *writer, const struct kvs_msg_go *msg);
void kvs_put_end(struct kvs_writer *writer, uint64_t request, uint64_t number, const char *text);
void kvs_put_fail(struct kvs_writer *writer, uint64_t room, uint64_t generation, const char *text);
void kvs_put_data(struct kvs_writer *writer, const struct kvs_msg_data *msg);

bool kvs_get_hello(struct kvs_reader *reader, struct kvs_msg_hello *msg_p, struct kvs_text *text);
bool kvs_get_challenge(struct kvs_reader *reader, struct kvs_msg_challenge *msg_p, struct kvs_text *text);
bool kvs_get_identity(struct kvs_reader *reader, struct kvs_msg_identity *msg_p, struct kvs_text *text);
bool kvs_get_welcome(struct kvs_reader *reader, struct kvs_msg_welcome *msg_p, struct kvs_text *text);
bool kvs_get_refuse(struct kvs_reader *reader, struct kvs_text *why_p, struct kvs_text *text);
bool kvs_get_pull(struct kvs_reader *reader, struct kvs_msg_pull *msg_p, struct kvs_text *text);
bool kvs_get_go(struct kvs_reader *reader, struct kvs_msg_go *msg_p, struct kvs_text *text);
bool kvs_get_end(struct kvs_reader *reader, struct kvs_msg_end *msg_p, struct kvs_text *text);
bool kvs_get_fail(struct kvs_reader *reader, struct kvs_msg_fail *msg_p, struct kvs_text *text);
bool kvs_get_data(struct kvs_reader *reader, struct kvs_msg_data *msg_p, struct kvs_text *text);

#endif
