/* SPDX-License-Identifier: Apache-2.0 */
/* The agent's thread: it waits for sockets and eventfds, reads messages, and lets the flights move their pieces. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cuda_link.h"
#include "link.h"
#include "log.h"
#include "rdma.h"
#include "sock.h"

#define EVENTS        64
#define HELD_MS       250 /* how often a transfer that moves by itself is looked at when nothing is heard of it */
#define HALF_OPEN_MAX 256 /* accepted connections that have not finished the handshake */

/* Given up for a moment when descriptors run out, so that a connection can be accepted and closed. */
static int spare_fd = -1;

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static uint32_t half_open(void)
{
	uint32_t count = 0;
	for (const struct kvs_link *link = kvs_state.links; link != NULL; link = link->next)
		count += link->role == KVS_ROLE_DECODE && link->state != KVS_LINK_READY ? 1 : 0;
	return count;
}

/* No descriptor is left: turn the caller away instead of being woken for it for ever. */
static void turn_away(int listener)
{
	close_fd(&spare_fd);
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	if (fd >= 0)
		close(fd);
	spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	kvs_log(KVS_LOG_WARN, "no descriptor is left for a peer's connection (RLIMIT_NOFILE)");
}

static void accept_one(int fd, bool is_unix)
{
	struct ucred cred;
	socklen_t size = sizeof(cred);
	if (half_open() >= HALF_OPEN_MAX) {
		kvs_log(KVS_LOG_WARN, "more than %d connections are in their handshake: one more is turned away",
		        HALF_OPEN_MAX);
		close(fd);
		return;
	}
	if (is_unix && (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) != 0 || cred.uid != kvs_state.self.uid)) {
		kvs_log(KVS_LOG_WARN, "a connection from user %u is turned away, we are user %u", (unsigned)cred.uid,
		        (unsigned)kvs_state.self.uid);
		close(fd);
		return;
	}
	if (!is_unix)
		kvs_tcp_options(fd, kvs_config_get()->timeout_ms);
	struct kvs_link *link = kvs_link_new(KVS_ROLE_DECODE, fd, kvs_state.key);
	if (link == NULL)
		return;
	link->is_unix = is_unix;
	link->state = KVS_LINK_GREETING;
	link->events = EPOLLIN;
	if (!kvs_watch_add(fd, EPOLLIN, KVS_WATCH_LINK, link->id))
		kvs_link_drop(link, "epoll: %m");
}

static void accept_all(int listener, bool is_unix)
{
	for (;;) {
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
			continue;
		if (fd < 0) {
			if (errno == EMFILE || errno == ENFILE)
				turn_away(listener);
			return;
		}
		accept_one(fd, is_unix);
	}
}

/* The connection ended, or what came over it is no message for us. */
static void bad_connection(struct kvs_link *link, bool ended, const struct kvs_text *text)
{
	if (ended && link->role == KVS_ROLE_PREFILL && link->state != KVS_LINK_READY) {
		kvs_link_drop(
		        link,
		        "the decode ended the handshake (%.200s): its record is outdated or its kvsplice of another "
		        "version, its log says which",
		        text->s);
		return;
	}
	if (!ended)
		kvs_log(KVS_LOG_WARN, "%s: %s", link->name[0] != '\0' ? link->name : "a stranger's connection",
		        text->s);
	kvs_link_drop(link, "%s", text->s);
}

static void read_messages(struct kvs_link *link)
{
	struct kvs_text text;
	struct kvs_reader body;
	uint16_t type;
	/* A few at a time: the others have their turn before the rest. */
	for (int i = 0; i < 16 && !link->drop && link->state != KVS_LINK_DEAD && link->conn.fd >= 0; i++) {
		bool open = kvs_conn_read(&link->conn, &text);
		enum kvs_conn_next next = open ? kvs_conn_next(&link->conn, &type, &body, &text) : KVS_CONN_BAD;
		if (next == KVS_CONN_NONE)
			return;
		if (next == KVS_CONN_BAD) {
			bad_connection(link, !open, &text);
			return;
		}
		if (link->role == KVS_ROLE_PREFILL)
			kvs_prefill_message(link, type, &body);
		else
			kvs_decode_message(link, type, &body);
		if (link->conn.fd >= 0)
			kvs_conn_take(&link->conn);
	}
}

static void on_data_event(struct kvs_link *link)
{
	const struct kvs_flight *flight = link->flights;
	if (link->data_fd < 0 || (flight != NULL && flight->started && flight->transport == KVS_TRANSPORT_TCP))
		return; /* the flight reads it */
	/* Closed by the prefill, or bytes that nobody asked for: either way it is of no more use. */
	close_fd(&link->data_fd);
}

static void on_event(const struct epoll_event *event)
{
	enum kvs_watch watch = (enum kvs_watch)(event->data.u64 >> 56);
	struct kvs_link *link = NULL;
	if (watch >= KVS_WATCH_LINK) {
		link = kvs_link_find(event->data.u64 & (UINT64_MAX >> 8));
		if (link == NULL)
			return; /* an event of this batch ended it */
	}
	switch (watch) {
	case KVS_WATCH_WAKE:
		kvs_event_clear(kvs_state.wake);
		return;
	case KVS_WATCH_LISTEN_UNIX:
		accept_all(kvs_state.listen_unix, true);
		return;
	case KVS_WATCH_LISTEN_TCP:
		accept_all(kvs_state.listen_tcp, false);
		return;
	case KVS_WATCH_VERBS:
		kvs_rdma_device_event(event->data.u64 & (UINT64_MAX >> 8));
		return;
	case KVS_WATCH_RDMA:
		kvs_rdma_event(link);
		return;
	case KVS_WATCH_STAGING:
		kvs_event_clear(link->staging.data);
		return;
	case KVS_WATCH_DATA:
		on_data_event(link);
		return;
	case KVS_WATCH_LINK:
		if (link->drop || link->conn.fd < 0)
			return;
		if (link->state == KVS_LINK_CONNECTING) {
			kvs_link_connected(link);
			return;
		}
		if ((event->events & EPOLLOUT) != 0)
			kvs_link_flush(link);
		if ((event->events & ~(uint32_t)EPOLLOUT) != 0)
			read_messages(link);
		return;
	}
}

/* Let the flights work; then how long may the thread sleep? The lock held, released for a moment. */
static int work(void)
{
	int overdue = kvs_flights_expire(kvs_now_ns());
	bool busy = kvs_flights_serve();
	if (!busy) {
		kvs_unlock();
		busy = kvs_flights_spin();
		kvs_lock();
	}
	if (busy || !kvs_flights_sleep())
		return 0;
	uint64_t now = kvs_now_ns();
	int due[] = {overdue, kvs_links_expire(now), kvs_stats_due_ms(now), kvs_cuda_expire(now),
	             kvs_flights_held() ? HELD_MS : -1};
	int least = -1;
	for (size_t i = 0; i < sizeof(due) / sizeof(due[0]); i++) {
		if (due[i] >= 0 && (least < 0 || due[i] < least))
			least = due[i];
	}
	return least;
}

static void end_links(void)
{
	while (kvs_state.links != NULL) {
		struct kvs_link *link = kvs_state.links;
		kvs_state.links = link->next;
		kvs_link_unref(link);
	}
}

static void *agent_main(void *unused)
{
	struct epoll_event events[EVENTS];
	(void)unused;
	kvs_lock();
	while (!kvs_state.stopping) {
		int timeout = work();
		int epoll = kvs_state.epoll;
		bool stats = kvs_stats_due_ms(kvs_now_ns()) == 0;
		kvs_unlock();
		if (stats)
			kvs_stats_flush(false);
		int count = epoll_wait(epoll, events, EVENTS, timeout);
		kvs_lock();
		for (int i = 0; i < count; i++)
			on_event(&events[i]);
		kvs_links_reap();
	}
	end_links();
	kvs_unlock();
	return NULL;
}

static bool start_listening(const char *host, struct kvs_text *text)
{
	const struct kvs_config *config = kvs_config_get();
	const char *where = config->listen != NULL ? config->listen : host;
	struct kvs_listen listen;
	struct kvs_text why;
	if (kvs_state.listen_unix >= 0)
		return true;
	kvs_state.listen_unix = kvs_listen_unix(kvs_state.unix_name, text);
	if (kvs_state.listen_unix < 0)
		return false;
	memset(&kvs_state.tcp, 0, sizeof(kvs_state.tcp));
	if (where == NULL)
		kvs_text_set(&why, "no address is known");
	else if (kvs_listen_parse(where, &listen, &why))
		kvs_state.listen_tcp = kvs_listen_tcp(&listen, &kvs_state.tcp, &why);
	/* Peers of this host need no TCP. */
	if (kvs_state.listen_tcp < 0)
		kvs_log(KVS_LOG_WARN, "no TCP for peers on other hosts: %s", why.s);
	if (kvs_watch_add(kvs_state.listen_unix, EPOLLIN, KVS_WATCH_LISTEN_UNIX, 0) &&
	    (kvs_state.listen_tcp < 0 || kvs_watch_add(kvs_state.listen_tcp, EPOLLIN, KVS_WATCH_LISTEN_TCP, 0)))
		return true;
	kvs_text_set(text, "epoll: %m");
	close_fd(&kvs_state.listen_unix);
	close_fd(&kvs_state.listen_tcp);
	return false;
}

static void close_all(void)
{
	close_fd(&kvs_state.epoll);
	close_fd(&kvs_state.wake);
	close_fd(&kvs_state.listen_unix);
	close_fd(&kvs_state.listen_tcp);
	close_fd(&spare_fd);
}

static bool start_thread(struct kvs_text *text)
{
	sigset_t all, before;
	kvs_identity_self(&kvs_state.self);
	kvs_state.epoll = epoll_create1(EPOLL_CLOEXEC);
	kvs_state.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (kvs_state.epoll < 0 || kvs_state.wake < 0 || !kvs_random(kvs_state.key, sizeof(kvs_state.key)) ||
	    !kvs_watch_add(kvs_state.wake, EPOLLIN, KVS_WATCH_WAKE, 0)) {
		kvs_text_set(text, "cannot start the agent: %m");
		close_all();
		return false;
	}
	/* The server's signals are for its own threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int error = pthread_create(&kvs_state.thread, NULL, agent_main, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error != 0) {
		errno = error;
		kvs_text_set(text, "cannot start the agent's thread: %m");
		close_all();
		return false;
	}
	(void)pthread_setname_np(kvs_state.thread, "kvsplice");
	kvs_state.running = true;
	return true;
}

bool kvs_agent_start(enum kvs_role role, const char *host, struct kvs_text *text)
{
	while (kvs_state.stopping)
		pthread_cond_wait(&kvs_state.changed, &kvs_state.lock);
	if (!kvs_state.running && !start_thread(text))
		return false;
	return role != KVS_ROLE_DECODE || start_listening(host, text);
}

void kvs_agent_stop(void)
{
	kvs_lock();
	if (!kvs_state.running || kvs_state.stopping || kvs_state.endpoints != NULL) {
		kvs_unlock();
		return;
	}
	kvs_state.stopping = true;
	pthread_t thread = kvs_state.thread;
	kvs_agent_wake();
	kvs_unlock();
	pthread_join(thread, NULL);
	kvs_rdma_stop();
	kvs_lock();
	close_all();
	kvs_state.running = false;
	kvs_state.stopping = false;
	pthread_cond_broadcast(&kvs_state.changed);
	kvs_unlock();
}

void kvs_agent_before_fork(void)
{
	kvs_lock();
}

void kvs_agent_after_fork_in_parent(void)
{
	kvs_unlock();
}

static void forget_link(struct kvs_link *link)
{
	close_fd(&link->conn.fd);
	for (uint32_t i = 0; i < link->conn.in_fd_count; i++)
		close(link->conn.in_fds[i]);
	for (uint32_t i = 0; i < link->conn.out_fd_count; i++)
		close(link->conn.out_fds[i]);
	kvs_staging_drop(&link->staging);
	close_fd(&link->data_fd);
	close_fd(&link->worker_wake);
}

/*
 * The lock is ours, as this thread took it before the fork. The threads that the objects belong to do not exist here,
 * so descriptors and mappings are given up and the memory is left alone: freeing it would gain a forked child nothing.
 */
void kvs_agent_after_fork_in_child(void)
{
	kvs_rdma_after_fork_in_child();
	kvs_cuda_after_fork_in_child();
	for (struct kvs_link *link = kvs_state.links; link != NULL; link = link->next)
		forget_link(link);
	close_all();
	kvs_state.endpoints = NULL;
	kvs_state.peers = NULL;
	kvs_state.links = NULL;
	memset(kvs_state.rooms, 0, sizeof(kvs_state.rooms));
	memset(kvs_state.sources, 0, sizeof(kvs_state.sources));
	memset(&kvs_state.stats, 0, sizeof(kvs_state.stats));
	kvs_state.running = kvs_state.stopping = false;
	pthread_cond_init(&kvs_state.changed, NULL);
	kvs_unlock();
}
