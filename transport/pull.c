/* SPDX-License-Identifier: Apache-2.0 */
/* What a prefill's worker calls: verdicts, pulls, the ends of source rooms. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_link.h"
#include "link.h"
#include "log.h"
#include "sources.h"
#include "verify.h"

#define GRACE_NS 1000000000u /* for the decode to confirm a cancel */

/* The link, ready, or NULL with text. The lock held, released while waiting. The caller owns one reference. */
static struct kvs_link *ready_link(uint64_t endpoint_id, uint64_t peer_id, uint64_t deadline_ns, struct kvs_text *text)
{
	struct kvs_endpoint *endpoint = kvs_endpoint_find(endpoint_id);
	struct kvs_peer *peer = kvs_peer_find(peer_id);
	if (endpoint == NULL || endpoint->role != KVS_ROLE_PREFILL || peer == NULL) {
		kvs_text_set(text, "%s %" PRIu64 " is not known to this process",
		             peer == NULL ? "peer" : "prefill endpoint", peer == NULL ? peer_id : endpoint_id);
		return NULL;
	}
	struct kvs_link *link = kvs_link_open(endpoint, peer);
	if (link == NULL) {
		kvs_text_set(text, "no memory or descriptor for a link to %s: %m", peer->name);
		return NULL;
	}
	link->refs++;
	bool in_time = true;
	while (link->state != KVS_LINK_READY && link->state != KVS_LINK_DEAD && in_time)
		in_time = kvs_wait_until(&kvs_state.changed, deadline_ns);
	if (link->state == KVS_LINK_READY && !link->drop)
		return link;
	kvs_text_set(text, "%.150s cannot be reached: %.300s", link->name,
	             link->state == KVS_LINK_DEAD || link->drop ? link->text.s : "the handshake is not over in time");
	kvs_link_unref(link);
	return NULL;
}

static uint64_t deadline(void)
{
	return kvs_now_ns() + (uint64_t)kvs_config_get()->timeout_ms * 1000000U;
}

void kvs_peer_verdict(uint64_t endpoint, uint64_t peer, uint32_t component, struct kvs_verdict *verdict_p)
{
	memset(verdict_p, 0, sizeof(*verdict_p));
	verdict_p->action = KVS_ACT_REFUSE;
	kvs_lock();
	struct kvs_link *link = ready_link(endpoint, peer, deadline(), &verdict_p->text);
	if (link != NULL) {
		if (component < link->endpoint->layout->component_count) {
			*verdict_p = link->verdicts[component];
		} else {
			verdict_p->refusal = KVS_REFUSE_COMPONENTS;
			kvs_text_set(&verdict_p->text, "component %u of %u", component,
			             link->endpoint->layout->component_count);
		}
		bool moves = verdict_p->action == KVS_ACT_COPY || verdict_p->action == KVS_ACT_SLICE;
		if (moves && link->route_count == 0) {
			verdict_p->action = KVS_ACT_REFUSE;
			kvs_text_set(&verdict_p->text, "no transport reaches %.150s: %.300s", link->name, link->text.s);
		}
		kvs_link_unref(link);
	}
	kvs_unlock();
}

static void send_pull(struct kvs_link *link, const struct kvs_request *request, const struct kvs_pull *pull)
{
	const struct kvs_layout *layout = link->endpoint->layout;
	struct kvs_writer body = {.data = NULL};
	struct kvs_msg_pull msg = {.request = request->id,
	                           .room = pull->room,
	                           .generation = pull->generation,
	                           .prefill_rank = layout->tp_rank + layout->pp_rank * layout->tp_size,
	                           .chunk = pull->chunk,
	                           .component = pull->component,
	                           .src_count = pull->src_count,
	                           .dst_count = pull->dst_count,
	                           .verify = request->verify ? 1 : 0,
	                           .digest = request->digest,
	                           .src_items = pull->src_items,
	                           .dst_items = pull->dst_items};
	kvs_put_pull(&body, &msg);
	kvs_link_send(link, KVS_MESSAGE_PULL, &body, NULL, 0);
}

static void send_end(struct kvs_link *link, uint16_t type, uint64_t request, uint64_t number, const char *text)
{
	struct kvs_writer body = {.data = NULL};
	kvs_put_end(&body, request, number, text);
	kvs_link_send(link, type, &body, NULL, 0);
}

/* Send what the decode asked for. The lock is released meanwhile. */
static void stream(struct kvs_link *link, struct kvs_request *request)
{
	const struct kvs_transport_ops *ops = kvs_transports[request->transport].ops;
	struct kvs_text text = {.s = ""};
	uint64_t number = request->stream, began = kvs_now_ns();
	uint32_t transport = request->transport;
	bool sent = false;
	request->go = false;
	atomic_store_explicit(&request->stop, request->done || request->cancelled, memory_order_release);
	if (request->bytes != request->plan->bytes) {
		kvs_text_set(&text, "the decode expects %" PRIu64 " bytes and the prefill has %" PRIu64, request->bytes,
		             request->plan->bytes);
	} else {
		link->streaming = true;
		kvs_unlock();
		sent = ops->send(link, request, number, &text);
		kvs_lock();
		link->streaming = false;
		for (struct kvs_request *other = link->requests; other != NULL; other = other->next)
			pthread_cond_signal(&other->cond);
	}
	request->pack_ns += kvs_now_ns() - began;
	if (sent) {
		kvs_state.stats.bytes_out[transport] += request->bytes;
		request->sent = ops;
		if (request->go || (request->done && !request->ok))
			kvs_request_abandon(link, request);
		return;
	}
	ops->close(link, false);
	if (!request->done && !request->go && !request->cancelled && text.s[0] != '\0')
		send_end(link, KVS_MESSAGE_ROUTE_FAILED, request->id, number, text.s);
}

/* From PULL to the end of the request. The lock held, released while waiting and packing. */
static void run(struct kvs_link *link, struct kvs_request *request, const struct kvs_pull *pull)
{
	bool cancel_sent = false;
	uint64_t until = request->deadline_ns;
	send_pull(link, request, pull);
	while (!request->done) {
		uint64_t now = kvs_now_ns();
		if ((request->cancelled || now >= request->deadline_ns) && !cancel_sent) {
			/* Only the decode can say that it writes no more. */
			kvs_text_set(&request->text, "%s",
			             request->cancelled ? "the prefill cancelled the request" : "");
			if (!request->cancelled)
				kvs_text_set(&request->text,
				             "the transfer took longer than %u ms (KVSPLICE_TIMEOUT_MS)",
				             kvs_config_get()->timeout_ms);
			send_end(link, KVS_MESSAGE_CANCEL, request->id, 0, request->text.s);
			cancel_sent = true;
			until = now + GRACE_NS;
			continue;
		}
		if (cancel_sent && now >= until) {
			kvs_link_drop(link, "it did not confirm the end of a request within %u ms",
			              (unsigned)(GRACE_NS / 1000000U));
			break;
		}
		if (request->go && !link->streaming && !cancel_sent) {
			stream(link, request);
			continue;
		}
		(void)kvs_wait_until(&request->cond, until);
	}
}

/* A failure noticed here: keep it, and tell the decode that knows the room. The lock held. */
static void fail_room(struct kvs_link *link, uint64_t endpoint, uint64_t room, uint64_t generation, const char *text,
                      bool tell)
{
	bool first = kvs_sources_fail(endpoint, room, text);
	if (!first || !tell)
		return;
	if (link != NULL)
		kvs_link_tell_failure(link, room, generation, text);
}

static bool make_plan(const struct kvs_link *link, const struct kvs_pull *pull, struct kvs_plan **plan_p,
                      struct kvs_text *text)
{
	const struct kvs_layout *ours = link->endpoint->layout;
	struct kvs_verdict verdict;
	if (pull->src_count > KVS_WIRE_ITEMS_MAX || pull->dst_count > KVS_WIRE_ITEMS_MAX) {
		kvs_text_set(text, "lists of %u and %u items (at most %u in one call)", pull->src_count,
		             pull->dst_count, KVS_WIRE_ITEMS_MAX);
		return false;
	}
	memset(&verdict, 0, sizeof(verdict));
	if (!kvs_plan_build(ours, link->peer_layout, pull->component, pull->src_items, pull->src_count, pull->dst_items,
	                    pull->dst_count, plan_p, &verdict)) {
		*text = verdict.text;
		return false;
	}
	if (kvs_copy_guard(*plan_p, KVS_SIDE_SOURCE, ours, pull->component, text))
		return true;
	kvs_plan_free(*plan_p);
	*plan_p = NULL;
	return false;
}

static void link_request(struct kvs_link *link, struct kvs_request *request)
{
	struct kvs_request **at = &link->requests;
	while (*at != NULL)
		at = &(*at)->next;
	*at = request;
}

static void unlink_request(struct kvs_link *link, struct kvs_request *request)
{
	struct kvs_request **at = &link->requests;
	while (*at != NULL && *at != request)
		at = &(*at)->next;
	if (*at != NULL)
		*at = request->next;
}

/* The link knows memory that is no longer there: end it, so that the next one is told of what there is now. */
static void end_stale(struct kvs_link *link, uint64_t deadline_ns, const char *why)
{
	kvs_link_drop(link, "%.400s", why);
	while (link->state != KVS_LINK_DEAD && kvs_wait_until(&kvs_state.changed, deadline_ns)) {
	}
}

/* The lock held. *stale_p: nothing was asked, and another link may carry it. */
static bool pull_locked(struct kvs_link *link, const struct kvs_pull *pull, uint64_t deadline_ns, bool *stale_p,
                        struct kvs_text *text)
{
	bool renewed = false, stale = false;
	struct kvs_plan *plan = NULL;
	struct kvs_request request = {.room = pull->room, .deadline_ns = deadline_ns};
	request.verify = kvs_config_get()->verify;
	kvs_unlock();
	bool planned = make_plan(link, pull, &plan, text) &&
	               kvs_cuda_sources_same(link, plan, pull->component, &renewed, text);
	if (planned && request.verify)
		planned = kvs_verify_digest(plan, KVS_SIDE_SOURCE, link->endpoint->cuda, &request.digest, text);
	kvs_lock();
	if (!planned && renewed) {
		kvs_plan_free(plan);
		end_stale(link, deadline_ns, text->s);
		*stale_p = true;
		return false;
	}
	if (!planned) {
		kvs_plan_free(plan);
		fail_room(link, pull->endpoint, pull->room, pull->generation, text->s, true);
		kvs_log(KVS_LOG_WARN, "room %" PRIu64 ": %s", pull->room, text->s);
		return false;
	}
	request.plan = plan;
	if (kvs_sources_ended(pull->endpoint, pull->room, text)) {
		/* Meanwhile. */
	} else if (plan->bytes == 0) {
		request.ok = true;
	} else if (link->state != KVS_LINK_READY) {
		kvs_text_set(text, "connection to %.150s lost: %.300s", link->name, link->text.s);
		fail_room(link, pull->endpoint, pull->room, pull->generation, text->s, false);
	} else {
		request.id = ++kvs_state.last_id;
		pthread_cond_init(&request.cond, NULL);
		link_request(link, &request);
		run(link, &request, pull);
		unlink_request(link, &request);
		pthread_cond_destroy(&request.cond);
		/* Done or not: source pages that were given away meanwhile were perhaps packed with somebody else's. */
		if (request.ok && kvs_sources_ended(pull->endpoint, pull->room, &request.text))
			request.ok = false;
		if (request.ok && link->endpoint->cuda != NULL) {
			kvs_unlock();
			request.ok = kvs_cuda_sources_same(link, plan, pull->component, &renewed, &request.text);
			kvs_lock();
			request.told_by_decode = request.ok;
			stale = !request.ok;
		}
		if (!request.ok) {
			*text = request.text;
			if (!request.told_by_decode && !request.cancelled)
				kvs_log(KVS_LOG_WARN, "room %" PRIu64 ": %s", pull->room, text->s);
			fail_room(link, pull->endpoint, pull->room, pull->generation, text->s, !request.told_by_decode);
			if (stale)
				kvs_link_drop(link, "%.400s", text->s);
		}
	}
	kvs_plan_free(plan);
	return request.ok;
}

bool kvs_pull(const struct kvs_pull *pull, struct kvs_text *text)
{
	struct kvs_text why = {.s = ""};
	bool ok = false;
	kvs_lock();
	uint64_t until = deadline();
	struct kvs_endpoint *endpoint = kvs_endpoint_find(pull->endpoint);
	if (endpoint != NULL)
		endpoint->workers++;
	if (!kvs_sources_ended(pull->endpoint, pull->room, &why)) {
		struct kvs_link *link;
		bool stale, again = false;
		do {
			stale = false;
			link = ready_link(pull->endpoint, pull->peer, until, &why);
			if (link != NULL) {
				ok = pull_locked(link, pull, until, &stale, &why);
				kvs_link_unref(link);
			}
			again = stale && !again;
		} while (again);
		if ((link == NULL || stale) && endpoint != NULL)
			fail_room(NULL, pull->endpoint, pull->room, pull->generation, why.s, false);
	}
	if (ok)
		kvs_state.stats.pulls_asked++;
	else
		kvs_state.stats.pulls_refused++;
	kvs_stats_changed(&kvs_state.stats);
	if (endpoint != NULL && --endpoint->workers == 0)
		pthread_cond_broadcast(&kvs_state.changed);
	kvs_unlock();
	if (!ok && text != NULL)
		*text = why;
	return ok;
}

void kvs_source_cancel(uint64_t endpoint, uint64_t room)
{
	kvs_lock();
	struct kvs_source *source = kvs_endpoint_find(endpoint) == NULL ? NULL : kvs_sources_get(endpoint, room);
	if (source != NULL)
		source->cancelled = true;
	for (struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		if (link->role != KVS_ROLE_PREFILL || link->endpoint->id != endpoint)
			continue;
		for (struct kvs_request *request = link->requests; request != NULL; request = request->next) {
			if (request->room != room)
				continue;
			request->cancelled = true;
			atomic_store_explicit(&request->stop, true, memory_order_release);
			kvs_request_wake(link, request);
		}
	}
	kvs_unlock();
}

void kvs_source_forget(uint64_t endpoint, uint64_t room)
{
	kvs_lock();
	kvs_sources_forget(endpoint, room);
	kvs_unlock();
}

void kvs_source_fail(uint64_t endpoint, uint64_t peer, uint64_t room, uint64_t generation, const char *text)
{
	kvs_lock();
	struct kvs_endpoint *owner = kvs_endpoint_find(endpoint);
	struct kvs_peer *decode = kvs_peer_find(peer);
	if (owner != NULL)
		(void)kvs_sources_fail(endpoint, room, text);
	struct kvs_link *link = owner == NULL || decode == NULL ? NULL : kvs_link_open(owner, decode);
	if (link != NULL)
		kvs_link_tell_failure(link, room, generation, text);
	kvs_unlock();
}

bool kvs_source_failed(uint64_t endpoint, uint64_t room, struct kvs_text *text_p)
{
	kvs_lock();
	bool ended = kvs_sources_ended(endpoint, room, text_p);
	kvs_unlock();
	return ended;
}
