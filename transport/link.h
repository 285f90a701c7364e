/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A link: the control connection between a prefill endpoint and a decode endpoint, and what belongs to it at this end.
 * The lock held, but for what a field says. Only the agent thread ends a link; others ask it to (kvs_link_drop).
 */
#ifndef KVS_TRANSPORT_LINK_H
#define KVS_TRANSPORT_LINK_H

#include "message.h"
#include "staging.h"
#include "state.h"

enum kvs_link_state {
	KVS_LINK_CONNECTING, /* prefill: the socket is not connected yet */
	KVS_LINK_GREETING,   /* prefill: hello sent; decode: accepted, nothing known */
	KVS_LINK_PROVING,    /* prefill: identity sent; decode: challenge sent */
	KVS_LINK_READY,
	KVS_LINK_DEAD, /* text says why */
};

/* Prefill: one kvs_pull call, on its worker's stack. */
struct kvs_request {
	struct kvs_request *next; /* in the link */
	uint64_t id;
	uint64_t room;
	pthread_cond_t cond;
	const struct kvs_plan *plan; /* constant */
	bool verify;                 /* digest is that of the source bytes */
	uint64_t digest;
	uint64_t deadline_ns; /* constant */
	bool cancelled;
	bool go; /* the decode asked for the bytes */
	uint64_t stream;
	uint32_t transport;
	uint64_t bytes;
	bool done;
	bool ok;
	bool told_by_decode; /* text came from there, so it is logged there */
	struct kvs_text text;
	atomic_bool stop;                     /* any thread: leave the stream */
	const struct kvs_transport_ops *sent; /* all bytes went out over it, and the decode has not ended the stream */
	uint64_t pack_ns;
};

/* Decode: one pull that was asked for. */
struct kvs_flight {
	struct kvs_flight *next;
	uint64_t request;
	uint64_t room;
	uint64_t generation;
	uint32_t component;
	uint32_t chunk;
	struct kvs_plan *plan;
	bool started;
	uint32_t transport; /* once started */
	uint32_t tried;     /* mask of the transports that failed for it */
	bool verify;        /* compare with digest when all is in place */
	uint64_t digest;
	struct kvs_sink sink;
	struct kvs_room *held; /* its busy count is ours as well: something is on its way into its memory */
	uint64_t held_ns;      /* since when */
	uint64_t plan_ns, copy_ns, asked_ns;
};

struct kvs_link {
	struct kvs_link *next;
	uint64_t id;
	uint32_t refs; /* the table, and workers */
	enum kvs_role role;
	enum kvs_link_state state;
	struct kvs_text text;
	bool drop; /* the agent is asked to end it */
	bool is_unix;
	bool refused;         /* dead because of a refusal: trying again at once makes no sense */
	uint64_t deadline_ns; /* of the handshake */
	uint64_t dead_ns;
	uint32_t events;               /* epoll events asked for */
	struct kvs_endpoint *endpoint; /* decode: NULL until the hello */
	struct kvs_peer *peer;         /* prefill */
	struct kvs_conn conn;
	uint8_t nonce[KVS_NONCE_SIZE]; /* ours */
	uint8_t peer_nonce[KVS_NONCE_SIZE];
	uint8_t token[KVS_TOKEN_SIZE];
	struct kvs_identity peer_identity; /* decode: as claimed */
	char name[160];                    /* of the other end, for messages */
	/* Constant once READY. */
	struct kvs_layout *peer_layout;
	struct kvs_verdict *verdicts; /* by component of our endpoint */
	bool splice_equal_tp;
	bool peer_device_memory;
	uint32_t route[KVS_TRANSPORT_COUNT];
	uint32_t route_count;
	uint32_t peer_transports;

	/* host: the consumer's side is the agent thread's, the producer's the worker's that has the stream. */
	struct kvs_staging staging;
	struct kvs_text staging_text; /* prefill: why it could not be mapped */
	int worker_wake;              /* prefill, eventfd: the worker in the stream looks at its request again */
	/* tcp: as above. */
	int data_fd;
	uint8_t *data_buffer;
	struct kvs_rdma *rdma;      /* rdma.h; NULL: none */
	struct kvs_cuda_link *cuda; /* cuda_link.h; NULL: none */

	struct kvs_request *requests; /* prefill */
	bool streaming;               /* a worker is in the stream */
	struct kvs_flight *flights;   /* decode, first come first served; the head is the active one */
	struct kvs_flight **flights_end;
	uint64_t last_stream;
	struct kvs_writer
	        pending; /* prefill: fail messages that wait for the handshake, each with its size before it */
};

/* What epoll events carry: which descriptor of which link. */
enum kvs_watch {
	KVS_WATCH_WAKE,
	KVS_WATCH_LISTEN_UNIX,
	KVS_WATCH_LISTEN_TCP,
	KVS_WATCH_VERBS, /* a number of rdma_device.h instead of a link */
	KVS_WATCH_LINK,  /* this one and those after it have a link */
	KVS_WATCH_STAGING,
	KVS_WATCH_DATA,
	KVS_WATCH_RDMA,
};

bool kvs_watch_add(int fd, uint32_t events, enum kvs_watch watch, uint64_t link);

/* A new link around a socket (-1: none yet), in the table. NULL: out of memory, the socket is closed. */
struct kvs_link *kvs_link_new(enum kvs_role role, int fd, const uint8_t key[KVS_KEY_SIZE]);
struct kvs_link *kvs_link_find(uint64_t id);
void kvs_link_unref(struct kvs_link *link);

/* Send a message; a failure drops the link. body is freed. */
void kvs_link_send(struct kvs_link *link, uint16_t type, struct kvs_writer *body, const int *fds, uint32_t fd_count);

/* The socket takes more: send what is queued. */
void kvs_link_flush(struct kvs_link *link);

/* Ask the agent to end it. The first reason stays. */
void kvs_link_drop(struct kvs_link *link, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The agent thread: end links that were asked to, forget the dead that nobody needs. */
void kvs_links_reap(void);

/* Milliseconds until the next handshake times out (-1: none is under way); those that have are dropped. */
int kvs_links_expire(uint64_t now_ns);

/* Verdicts of all components; refusals are logged. False: out of memory. */
bool kvs_link_judge(struct kvs_link *link);

/* ---- prefill (prefill.c) ---- */

/* The link to this peer, begun if there is none or the last one died. NULL: out of memory. */
struct kvs_link *kvs_link_open(struct kvs_endpoint *endpoint, struct kvs_peer *peer);
/* The socket is connected or has failed to. */
void kvs_link_connected(struct kvs_link *link);
/* The connection ended before READY: is there another address to try? */
bool kvs_link_retry(struct kvs_link *link, const char *why);
void kvs_prefill_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body);
/* The link is dead: so are its requests. */
void kvs_requests_end(struct kvs_link *link);
/* Wake the worker of a request wherever it waits. */
void kvs_request_wake(struct kvs_link *link, struct kvs_request *request);

/* Its stream will not be taken to the end although it was sent. */
void kvs_request_abandon(struct kvs_link *link, struct kvs_request *request);
/* Tell the decode that a room has failed, as soon as the handshake is over. */
void kvs_link_tell_failure(struct kvs_link *link, uint64_t room, uint64_t generation, const char *text);

/* The worker in a stream: is it to leave? */
static inline bool kvs_request_stopped(struct kvs_request *request)
{
	return atomic_load_explicit(&request->stop, memory_order_acquire);
}

/* ---- decode (decode.c, flights.c) ---- */

void kvs_decode_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body);
void kvs_flight_ask(struct kvs_link *link, struct kvs_msg_pull *msg);
void kvs_flight_cancel(struct kvs_link *link, uint64_t request, const char *text);
void kvs_flight_route_failed(struct kvs_link *link, uint64_t request, uint64_t stream, const char *text);
/* The link is dead: so are its flights, and their rooms fail. */
void kvs_flights_end(struct kvs_link *link);
/* One turn for every link with work, the lock released while bytes are copied. True: something was moved. */
bool kvs_flights_serve(void);
/* Fail the pulls whose prefill has not sent everything in time. Milliseconds to the next such time, or -1. */
int kvs_flights_expire(uint64_t now_ns);
/* Nothing to do? Asks all to wake us; false: there is something already. */
bool kvs_flights_sleep(void);
/* Is something on its way into memory by itself? Then who moves it is to look at its clock. */
bool kvs_flights_held(void);
/* Spin for a moment until a flight has something; no lock needed: only the agent thread ends flights. */
bool kvs_flights_spin(void);

/* ---- route.c ---- */

/* Decode: the transports that reach this prefill, opened, in order; msg_p->why says so in words. */
void kvs_route_choose(struct kvs_link *link, struct kvs_text *why_p);

/* ---- secret.c ---- */

/* Which side proves that it knows the secret. */
void kvs_secret_proof(const char *side, const uint8_t first[KVS_NONCE_SIZE], const uint8_t second[KVS_NONCE_SIZE],
                      const uint8_t key[KVS_KEY_SIZE], uint8_t proof_p[KVS_PROOF_SIZE]);
bool kvs_secret_read(const char *path, uint8_t secret_p[KVS_SECRET_MAX], size_t *size_p, struct kvs_text *text);

#endif
