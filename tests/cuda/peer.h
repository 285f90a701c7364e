/* SPDX-License-Identifier: Apache-2.0 */
/* A process of its own with all prefill ranks of a test, driven over a socket. */
#ifndef KVS_TEST_CUDA_PEER_H
#define KVS_TEST_CUDA_PEER_H

#include "../../transport/agent.h"
#include "model.h"

#define PEER_ITEMS 512

enum order {
	ORDER_SETUP, /* allocate, fill, register */
	ORDER_PEER,  /* a decode's record; number: its id */
	ORDER_PULL,
	ORDER_PULL_ALL,      /* every rank at once, each from a thread of its own; the first answer that is not ok */
	ORDER_PULL_REPLACED, /* a pull, and after number us the rank gets other pages */
	ORDER_PAUSE,         /* give the pages of a rank back */
	ORDER_RESUME,        /* new pages at the same addresses, filled */
	ORDER_FREE,          /* free the pages for good */
	ORDER_LIVE,          /* text: a kind; number: how many */
	ORDER_CALLS,         /* text: a function; number: how often it was called */
	ORDER_FAULT,         /* text: a list for the double */
	ORDER_WRITES,        /* number: words written to the rank's memory by kernels of any process that counts here */
	ORDER_CANCEL,        /* a room */
	ORDER_FORGET,        /* a room */
	ORDER_CAPTURE,       /* begin (number 1) or end a global capture; number: its result */
};

struct message {
	enum order order;
	struct shape shape;
	uint32_t tp_size;
	int device;
	enum kvs_cuda_kind kind;
	uint32_t parts;
	uint32_t rank;
	uint64_t peer;
	uint64_t room;
	uint64_t generation;
	uint32_t component;
	uint32_t chunk;
	uint32_t count;
	int32_t src[PEER_ITEMS];
	int32_t dst[PEER_ITEMS];
	uint32_t record_size;
	uint8_t record[KVS_RECORD_MAX];
	char transports[64];
	char text[256];
	uint32_t timeout_ms;
	bool verify;
	uint64_t number;
};

struct answer {
	bool ok;
	uint64_t number;
	char text[KVS_TEXT_SIZE];
};

struct peer {
	int fd;
	int pid; /* 0: not our child */
};

/* Start one; extra: NAME=VALUE for its environment, or NULL; apart: as process 1 of a pid namespace of its own. */
struct peer peer_start(const char *extra, bool apart);

/*
 * Go on as process 1 of a new pid (and user) namespace; what called it waits for that process and ends with its status.
 * Skips the case where the kernel does not permit it.
 */
void enter_namespace(void);

struct answer peer_do(struct peer *peer, const struct message *message);
/* Send without waiting for the answer; peer_wait gets it. */
void peer_send(struct peer *peer, const struct message *message);
struct answer peer_wait(struct peer *peer);
void peer_kill(struct peer *peer);
void peer_stop(struct peer *peer);

int prefill_main(int fd);

#endif
