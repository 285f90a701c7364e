/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "link.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "cuda_link.h"
#include "log.h"
#include "rdma.h"

bool kvs_watch_add(int fd, uint32_t events, enum kvs_watch watch, uint64_t link)
{
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)watch << 56 | link};
	return epoll_ctl(kvs_state.epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

struct kvs_link *kvs_link_new(enum kvs_role role, int fd, const uint8_t key[KVS_KEY_SIZE])
{
	struct kvs_link *link = calloc(1, sizeof(*link));
	if (link == NULL) {
		if (fd >= 0)
			close(fd);
		return NULL;
	}
	link->id = ++kvs_state.last_id;
	link->refs = 1;
	link->role = role;
	link->deadline_ns = kvs_now_ns() + (uint64_t)kvs_config_get()->timeout_ms * 1000000U;
	link->worker_wake = -1;
	link->data_fd = -1;
	link->flights_end = &link->flights;
	kvs_staging_init(&link->staging);
	kvs_conn_init(&link->conn, fd, key);
	link->next = kvs_state.links;
	kvs_state.links = link;
	return link;
}

struct kvs_link *kvs_link_find(uint64_t id)
{
	struct kvs_link *link = kvs_state.links;
	while (link != NULL && link->id != id)
		link = link->next;
	return link;
}

void kvs_link_unref(struct kvs_link *link)
{
	if (--link->refs > 0)
		return;
	kvs_conn_close(&link->conn);
	kvs_staging_drop(&link->staging);
	kvs_rdma_free(link);
	kvs_cuda_free(link);
	if (link->data_fd >= 0)
		close(link->data_fd);
	if (link->worker_wake >= 0)
		close(link->worker_wake);
	free(link->data_buffer);
	free(link->pending.data);
	kvs_layout_free(link->peer_layout);
	free(link->verdicts);
	kvs_endpoint_unref(link->endpoint);
	kvs_peer_unref(link->peer);
	free(link);
}

/* Ask epoll for what is needed now. */
static void update_events(struct kvs_link *link)
{
	uint32_t events = EPOLLIN | (kvs_conn_unsent(&link->conn) ? (uint32_t)EPOLLOUT : 0U);
	if (events == link->events || link->conn.fd < 0)
		return;
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)KVS_WATCH_LINK << 56 | link->id};
	int operation = link->events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
	if (epoll_ctl(kvs_state.epoll, operation, link->conn.fd, &event) == 0)
		link->events = events;
	else
		kvs_link_drop(link, "epoll: %m");
}

void kvs_link_send(struct kvs_link *link, uint16_t type, struct kvs_writer *body, const int *fds, uint32_t fd_count)
{
	struct kvs_text text;
	if (link->state != KVS_LINK_DEAD && link->conn.fd >= 0) {
		if (kvs_conn_send(&link->conn, type, body, fds, fd_count, &text))
			update_events(link);
		else
			kvs_link_drop(link, "%s", text.s);
	}
	if (body != NULL) {
		free(body->data);
		*body = (struct kvs_writer){.data = NULL};
	}
}

void kvs_link_flush(struct kvs_link *link)
{
	struct kvs_text text;
	if (kvs_conn_flush(&link->conn, &text))
		update_events(link);
	else
		kvs_link_drop(link, "%s", text.s);
}

void kvs_link_drop(struct kvs_link *link, const char *format, ...)
{
	if (link->drop || link->state == KVS_LINK_DEAD)
		return;
	va_list args;
	va_start(args, format);
	/* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): it is set in the line above */
	(void)vsnprintf(link->text.s, sizeof(link->text.s), format, args);
	va_end(args);
	link->drop = true;
	kvs_agent_wake();
}

static void link_die(struct kvs_link *link)
{
	bool ready = link->state == KVS_LINK_READY;
	bool ours = (link->endpoint != NULL && link->endpoint->removed) || (link->peer != NULL && link->peer->removed);
	link->refused = !ready;
	link->state = KVS_LINK_DEAD;
	link->drop = false;
	link->dead_ns = kvs_now_ns();
	kvs_conn_close(&link->conn);
	link->events = 0;
	if (ready && !ours)
		kvs_state.stats.links_lost++;
	else if (!ready && !ours && link->name[0] != '\0')
		kvs_state.stats.links_refused++;
	kvs_stats_changed(&kvs_state.stats);
	/* What was lost in mid-transfer is a warning of the requests concerned; a peer that left is none. */
	if (ready || ours)
		kvs_log(KVS_LOG_INFO, "%s: link ended: %s", link->name, link->text.s);
	else if (link->name[0] != '\0')
		kvs_log(KVS_LOG_WARN, "%s: no link: %s", link->name, link->text.s);
	else
		kvs_log(KVS_LOG_DEBUG, "a connection ended before its hello: %s", link->text.s);
	if (link->role == KVS_ROLE_PREFILL)
		kvs_requests_end(link);
	else
		kvs_flights_end(link);
	pthread_cond_broadcast(&kvs_state.changed);
}

void kvs_links_reap(void)
{
	struct kvs_link **at = &kvs_state.links;
	while (*at != NULL) {
		struct kvs_link *link = *at;
		if (link->endpoint != NULL && link->endpoint->removed)
			kvs_link_drop(link, "the endpoint was removed");
		if (link->peer != NULL && link->peer->removed)
			kvs_link_drop(link, "the peer was removed");
		if (link->drop && (link->role != KVS_ROLE_PREFILL || !kvs_link_retry(link, link->text.s)))
			link_die(link);
		/* A prefill's dead link stays: it says why. */
		bool needed = link->endpoint != NULL && !link->endpoint->removed && link->peer != NULL &&
		              !link->peer->removed;
		if (link->state != KVS_LINK_DEAD || needed) {
			at = &link->next;
			continue;
		}
		*at = link->next;
		kvs_link_unref(link);
		pthread_cond_broadcast(&kvs_state.changed);
	}
}

int kvs_links_expire(uint64_t now_ns)
{
	int least = -1;
	for (struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		if (link->state == KVS_LINK_READY || link->state == KVS_LINK_DEAD || link->drop)
			continue;
		if (now_ns >= link->deadline_ns) {
			kvs_link_drop(link, "the handshake took longer than %u ms (KVSPLICE_TIMEOUT_MS)",
			              kvs_config_get()->timeout_ms);
			continue;
		}
		int ms = (int)((link->deadline_ns - now_ns) / 1000000) + 1;
		least = least < 0 || ms < least ? ms : least;
	}
	return least;
}

bool kvs_link_judge(struct kvs_link *link)
{
	const struct kvs_layout *ours = link->endpoint->layout;
	const struct kvs_layout *prefill = link->role == KVS_ROLE_PREFILL ? ours : link->peer_layout;
	const struct kvs_layout *decode = link->role == KVS_ROLE_PREFILL ? link->peer_layout : ours;
	link->verdicts = calloc((size_t)ours->component_count + 1, sizeof(*link->verdicts));
	if (link->verdicts == NULL)
		return false;
	for (uint32_t c = 0; c < ours->component_count; c++) {
		struct kvs_verdict *verdict = &link->verdicts[c];
		kvs_policy_judge(prefill, decode, c, link->splice_equal_tp, verdict);
		if (verdict->action != KVS_ACT_REFUSE)
			continue;
		kvs_log(KVS_LOG_WARN, "%s: refused: %s", link->name, verdict->text.s);
		if ((unsigned)verdict->refusal < KVS_REFUSAL_COUNT)
			kvs_state.stats.refusals[verdict->refusal]++;
	}
	return true;
}
