/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How messages of the control connection are framed, and the bounded reader and writer that their bodies are made with.
 * Numbers are little endian, without padding. A reader never goes past its end: it notes that it would have and gives
 * zeros, so a decoder checks once, at its end.
 */
#ifndef KVS_TRANSPORT_WIRE_H
#define KVS_TRANSPORT_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../policy/layout.h"
#include "../policy/text.h"
#include "record.h"

#define KVS_WIRE_MAGIC   0x5753564bu /* "KVSW" */
#define KVS_WIRE_VERSION 1

#define KVS_WIRE_SMALL     4096u
#define KVS_WIRE_LAYOUT    (8u << 20)
#define KVS_WIRE_ITEMS_MAX (1u << 21) /* in one list of a pull */
#define KVS_WIRE_PULL      (2 * KVS_WIRE_ITEMS_MAX * 4u + KVS_WIRE_SMALL)

/* Name, number on the wire, what it is for, the longest body. Numbers are never used again for something else. */
#define KVS_MESSAGE_TABLE(X) \
	X(HELLO, 1, "hello", KVS_WIRE_SMALL)                /* prefill: which endpoint, a nonce */ \
	X(CHALLENGE, 2, "challenge", KVS_WIRE_SMALL)        /* decode: a nonce, its proof of the secret */ \
	X(IDENTITY, 3, "identity", KVS_WIRE_LAYOUT)         /* prefill: its proof, who it is, its layout */ \
	X(WELCOME, 4, "welcome", KVS_WIRE_LAYOUT)           /* decode: its layout, the route, staging descriptors */ \
	X(REFUSE, 5, "refuse", KVS_WIRE_SMALL)              /* either: no link, and why */ \
	X(PULL, 6, "pull", KVS_WIRE_PULL)                   /* prefill: pull these items */ \
	X(GO, 7, "go", KVS_WIRE_SMALL)                      /* decode: send the bytes over this transport */ \
	X(ROUTE_FAILED, 8, "route-failed", KVS_WIRE_SMALL)  /* prefill: cannot, use the next one */ \
	X(DONE, 9, "done", KVS_WIRE_SMALL)                  /* decode: the pull has ended */ \
	X(CANCEL, 10, "cancel", KVS_WIRE_SMALL)             /* prefill: end the pull */ \
	X(FAIL, 11, "fail", KVS_WIRE_SMALL)                 /* prefill: the room has failed */ \
	X(DATA, 12, "data", KVS_WIRE_SMALL)                 /* prefill: this connection carries a link's bytes */ \
	X(RDMA_CONNECT, 13, "rdma-connect", KVS_WIRE_SMALL) /* decode: make a queue pair to mine */ \
	X(RDMA_READY, 14, "rdma-ready", KVS_WIRE_LAYOUT)    /* prefill: made, with the memory that may be read */ \
	X(RDMA_CREDIT, 15, "rdma-credit", KVS_WIRE_SMALL)   /* decode: so many pieces may be packed */ \
	X(RDMA_PACKED, 16, "rdma-packed", KVS_WIRE_SMALL)   /* prefill: so many are */ \
	X(CUDA_ASK, 17, "cuda-ask", KVS_WIRE_SMALL)         /* decode: descriptors of these allocations, please */ \
	X(CUDA_FDS, 18, "cuda-fds", KVS_WIRE_SMALL)         /* prefill: here they are, or why not */

enum kvs_message_type {
#define X(id, number, name, limit) KVS_MESSAGE_##id = (number),
	KVS_MESSAGE_TABLE(X)
#undef X
};

struct kvs_wire_header {
	uint32_t magic;
	uint16_t version;
	uint16_t type;
	uint32_t length; /* of the body */
	uint32_t zero;
	uint8_t key[KVS_KEY_SIZE];
};

_Static_assert(offsetof(struct kvs_wire_header, length) == 8, "header");
_Static_assert(offsetof(struct kvs_wire_header, key) == 16, "header");
_Static_assert(sizeof(struct kvs_wire_header) == 32, "header");

/* "pull", ...; "unknown" for a number that is none. */
const char *kvs_message_name(uint16_t type);

void kvs_wire_header_init(struct kvs_wire_header *header_p, uint16_t type, uint32_t length,
                          const uint8_t key[KVS_KEY_SIZE]);

/* Magic, version, known type, length within the type's limit, key. False with text. Pure. */
bool kvs_wire_header_check(const struct kvs_wire_header *header, const uint8_t key[KVS_KEY_SIZE],
                           struct kvs_text *text);

struct kvs_writer {
	uint8_t *data; /* owned; free(data) */
	size_t size;
	size_t capacity;
	bool failed; /* out of memory: what follows is dropped */
};

void kvs_put_bytes(struct kvs_writer *writer, const void *data, size_t size);
void kvs_put_u32(struct kvs_writer *writer, uint32_t value);
void kvs_put_u64(struct kvs_writer *writer, uint64_t value);
void kvs_put_string(struct kvs_writer *writer, const char *text); /* at most KVS_TEXT_SIZE - 1 bytes of it */
void kvs_put_layout(struct kvs_writer *writer, const struct kvs_layout *layout); /* addresses as zero */

struct kvs_reader {
	const uint8_t *data;
	size_t left;
	bool failed; /* there was less than asked for */
};

void kvs_get_bytes(struct kvs_reader *reader, void *data_p, size_t size);
/* The next size bytes where they are, valid as long as the reader's data; NULL: there are fewer, or none. */
const void *kvs_get_inside(struct kvs_reader *reader, size_t size);
uint32_t kvs_get_u32(struct kvs_reader *reader);
uint64_t kvs_get_u64(struct kvs_reader *reader);
void kvs_get_text(struct kvs_reader *reader, struct kvs_text *text_p);

/* Owned by the caller; NULL with text: cut off, too many tensors, out of memory, or not sane (kvs_layout_check). */
struct kvs_layout *kvs_get_layout(struct kvs_reader *reader, struct kvs_text *text);

#endif
