/* SPDX-License-Identifier: Apache-2.0 */
/* The decode's pulls: what was asked for and is being put in place. The only code that writes registered memory. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_memory.h"
#include "link.h"
#include "log.h"
#include "rooms.h"
#include "verify.h"

#define FLIGHTS_MAX 4096     /* waiting on one link: more than workers can ask for */
#define TURN_NS     1000000u /* of one link, before the next has its turn; pieces are far shorter */
#define SPIN_NS     30000u
#define SPIN_LINKS  64
#define LATE_NS     250000000u /* after its own timeout a prefill that is able to says itself why it gave up */

/* Links whose flight may get bytes without an event; the agent thread's own. */
static struct kvs_link *spin_links[SPIN_LINKS];
static uint32_t spin_count;

static const struct kvs_transport_ops *flight_ops(const struct kvs_flight *flight)
{
	return kvs_transports[flight->transport].ops;
}

static void send_done(struct kvs_link *link, uint64_t request, bool ok, const char *text)
{
	struct kvs_writer body = {.data = NULL};
	kvs_put_end(&body, request, ok ? 1 : 0, text);
	kvs_link_send(link, KVS_MESSAGE_DONE, &body, NULL, 0);
	if (ok)
		kvs_state.stats.pulls_served++;
	else
		kvs_state.stats.pulls_failed++;
	kvs_stats_changed(&kvs_state.stats);
}

static void unlink_flight(struct kvs_link *link, struct kvs_flight *flight)
{
	struct kvs_flight **at = &link->flights;
	while (*at != flight)
		at = &(*at)->next;
	*at = flight->next;
	if (link->flights_end == &flight->next)
		link->flights_end = at;
	kvs_plan_free(flight->plan);
	free(flight);
}

static struct kvs_room *flight_room(const struct kvs_link *link, const struct kvs_flight *flight)
{
	return kvs_rooms_find(link->endpoint->id, flight->room, flight->generation);
}

/* Nothing is on its way into the room's memory any more: it may be closed. */
static void let_go(struct kvs_flight *flight)
{
	if (flight->held == NULL)
		return;
	flight->held->busy--;
	flight->held = NULL;
	pthread_cond_broadcast(&kvs_state.changed);
}

/* End its stream at the transport. */
static void close_stream(struct kvs_link *link, struct kvs_flight *flight, bool ok)
{
	if (flight->started)
		flight_ops(flight)->close(link, ok);
	let_go(flight);
}

/* The first decider of a failure writes the warning. */
static void fail_flight(struct kvs_link *link, struct kvs_flight *flight, const char *text)
{
	struct kvs_room *room = flight_room(link, flight);
	if (room != NULL && !room->failed) {
		kvs_log(KVS_LOG_WARN, "room %" PRIu64 ": %s", flight->room, text);
		kvs_room_fail(room, text);
	}
	close_stream(link, flight, false);
	send_done(link, flight->request, false, text);
	unlink_flight(link, flight);
}

static void complete_flight(struct kvs_link *link, struct kvs_flight *flight, struct kvs_room *room)
{
	uint64_t bytes = flight->plan->bytes;
	room->bytes += bytes;
	room->runs += flight->plan->runs;
	room->pulls++;
	room->plan_ns += flight->plan_ns;
	room->copy_ns += flight->copy_ns;
	room->components |= 1U << flight->component;
	room->last_ns = kvs_now_ns();
	if (flight->started) {
		room->transports |= 1U << flight->transport;
		kvs_state.stats.bytes_in[flight->transport] += bytes;
	}
	close_stream(link, flight, true);
	send_done(link, flight->request, true, "");
	unlink_flight(link, flight);
}

/* Is the memory that a plan writes still what it was when the room was opened? */
static bool destination_same(const struct kvs_link *link, const struct kvs_room *room, const struct kvs_plan *plan,
                             uint32_t component, struct kvs_text *text)
{
	struct kvs_cuda_memory *memory = link->endpoint->cuda;
	if (room->memory_epoch != kvs_cuda_memory_epoch(memory)) {
		kvs_text_set(text, "the decode's GPU memory was replaced after room %" PRIu64 " was opened",
		             room->number);
		return false;
	}
	return kvs_cuda_memory_check(memory, plan, KVS_SIDE_DESTINATION, component, text);
}

/* Everything that a pull must satisfy before any memory is touched. *plan_p is the caller's. */
static bool check_pull(struct kvs_link *link, const struct kvs_room *room, const struct kvs_msg_pull *msg,
                       struct kvs_plan **plan_p, struct kvs_text *text)
{
	const struct kvs_layout *ours = link->endpoint->layout, *prefill = link->peer_layout;
	struct kvs_verdict verdict;
	uint64_t rank = prefill->tp_rank + (uint64_t)prefill->pp_rank * prefill->tp_size;
	if (msg->prefill_rank != rank) {
		kvs_text_set(text, "a pull for prefill rank %u over the link of rank %" PRIu64, msg->prefill_rank,
		             rank);
		return false;
	}
	if (!kvs_room_allows(room, msg->component, msg->dst_items, msg->dst_count, text))
		return false;
	if (link->verdicts[msg->component].action == KVS_ACT_REFUSE) {
		*text = link->verdicts[msg->component].text;
		return false;
	}
	memset(&verdict, 0, sizeof(verdict));
	if (!kvs_plan_build(prefill, ours, msg->component, msg->src_items, msg->src_count, msg->dst_items,
	                    msg->dst_count, plan_p, &verdict)) {
		*text = verdict.text;
		return false;
	}
	if (kvs_copy_guard(*plan_p, KVS_SIDE_DESTINATION, ours, msg->component, text) &&
	    destination_same(link, room, *plan_p, msg->component, text))
		return true;
	kvs_plan_free(*plan_p);
	*plan_p = NULL;
	return false;
}

void kvs_flight_ask(struct kvs_link *link, struct kvs_msg_pull *msg)
{
	struct kvs_text text;
	struct kvs_plan *plan = NULL;
	uint64_t began = kvs_now_ns();
	uint32_t waiting = 0;
	struct kvs_room *room = kvs_rooms_find(link->endpoint->id, msg->room, msg->generation);
	if (room == NULL) {
		kvs_text_set(&text, "room %" PRIu64 " is closed at the decode", msg->room);
		send_done(link, msg->request, false, text.s);
		return;
	}
	if (room->failed) {
		send_done(link, msg->request, false, room->text.s);
		return;
	}
	for (const struct kvs_flight *other = link->flights; other != NULL; other = other->next)
		waiting++;
	struct kvs_flight *flight = waiting < FLIGHTS_MAX ? calloc(1, sizeof(*flight)) : NULL;
	if (flight == NULL)
		kvs_text_set(&text, "no memory, or too many pulls wait already (%u)", waiting);
	if (flight == NULL || !check_pull(link, room, msg, &plan, &text)) {
		free(flight);
		kvs_log(KVS_LOG_WARN, "room %" PRIu64 ": refused what %s asks for: %s", msg->room, link->name, text.s);
		kvs_room_fail(room, text.s);
		send_done(link, msg->request, false, text.s);
		return;
	}
	flight->request = msg->request;
	flight->room = msg->room;
	flight->generation = room->generation;
	flight->component = msg->component;
	flight->chunk = msg->chunk;
	flight->verify = msg->verify != 0;
	flight->digest = msg->digest;
	flight->plan = plan;
	flight->asked_ns = kvs_now_ns();
	flight->plan_ns = flight->asked_ns - began;
	*link->flights_end = flight;
	link->flights_end = &flight->next;
	room->prefill_ranks |= (uint64_t)1 << (msg->prefill_rank % 64);
	if (room->first_ns == 0)
		room->first_ns = began;
	if (plan->bytes == 0)
		complete_flight(link, flight, room);
}

static struct kvs_flight *find_flight(struct kvs_link *link, uint64_t request)
{
	struct kvs_flight *flight = link->flights;
	while (flight != NULL && flight->request != request)
		flight = flight->next;
	return flight; /* NULL: it has ended, and the answer is on its way */
}

void kvs_flight_cancel(struct kvs_link *link, uint64_t request, const char *text)
{
	struct kvs_flight *flight = find_flight(link, request);
	if (flight == NULL)
		return;
	struct kvs_room *room = flight_room(link, flight);
	if (room != NULL)
		kvs_room_fail(room, text); /* the prefill has logged it */
	fail_flight(link, flight, text);
}

/* The transport cannot go on: the others of the route have their turn before it is tried for later pulls again. */
static void hand_over(struct kvs_link *link, struct kvs_flight *flight, const char *text)
{
	uint32_t failed = flight->transport, last = link->route_count - 1;
	close_stream(link, flight, false);
	flight->started = false;
	flight->tried |= 1U << failed;
	for (uint32_t i = 0; i < last; i++) {
		if (link->route[i] != failed)
			continue;
		memmove(&link->route[i], &link->route[i + 1], (last - i) * sizeof(link->route[0]));
		link->route[last] = failed;
	}
	kvs_state.stats.fallbacks[failed]++;
	kvs_text_set(&kvs_state.stats.fallback_reason[failed], "%s", text);
	kvs_stats_changed(&kvs_state.stats);
	for (uint32_t i = 0; i < link->route_count; i++) {
		if ((flight->tried >> link->route[i] & 1) == 0) {
			kvs_log(KVS_LOG_WARN, "%s: room %" PRIu64 ": %s failed (%s), going on with %s", link->name,
			        flight->room, kvs_transports[failed].name, text, kvs_transports[link->route[i]].name);
			return;
		}
	}
	struct kvs_text all;
	kvs_text_set(&all, "no transport is left, the last one, %s, failed: %s", kvs_transports[failed].name, text);
	fail_flight(link, flight, all.s);
}

void kvs_flight_route_failed(struct kvs_link *link, uint64_t request, uint64_t stream, const char *text)
{
	struct kvs_flight *flight = find_flight(link, request);
	if (flight != NULL && flight->started && flight->sink.stream == stream)
		hand_over(link, flight, text);
}

void kvs_flights_end(struct kvs_link *link)
{
	while (link->flights != NULL) {
		struct kvs_flight *flight = link->flights;
		struct kvs_room *room = flight_room(link, flight);
		if (room != NULL && !room->failed) {
			struct kvs_text text;
			kvs_text_set(&text, "%.150s went away in mid-transfer: %.300s", link->name, link->text.s);
			kvs_log(KVS_LOG_WARN, "room %" PRIu64 ": %s", flight->room, text.s);
			kvs_room_fail(room, text.s);
		}
		kvs_state.stats.pulls_failed++;
		close_stream(link, flight, false);
		unlink_flight(link, flight);
	}
}

/* Choose the transport and ask the prefill for the bytes. */
static void start_flight(struct kvs_link *link, struct kvs_flight *flight)
{
	uint32_t i = 0;
	while (i < link->route_count && (flight->tried >> link->route[i] & 1) != 0)
		i++;
	if (i == link->route_count) {
		fail_flight(link, flight, "no transport reaches this prefill");
		return;
	}
	struct kvs_writer body = {.data = NULL};
	flight->started = true;
	flight->transport = link->route[i];
	flight->sink =
	        (struct kvs_sink){.stream = ++link->last_stream, .component = flight->component, .plan = flight->plan};
	struct kvs_msg_go msg = {.request = flight->request,
	                         .stream = flight->sink.stream,
	                         .bytes = flight->plan->bytes,
	                         .transport = flight->transport};
	kvs_put_go(&body, &msg);
	kvs_link_send(link, KVS_MESSAGE_GO, &body, NULL, 0);
}

/* KVSPLICE_VERIFY: is what is in place what the prefill had? False with text. The lock not held. */
static bool verified(struct kvs_link *link, const struct kvs_flight *flight, struct kvs_text *text)
{
	struct kvs_text why = {.s = "the bytes in place are not those that were sent"};
	uint64_t digest = 0;
	if (kvs_verify_digest(flight->plan, KVS_SIDE_DESTINATION, link->endpoint->cuda, &digest, &why) &&
	    digest == flight->digest)
		return true;
	kvs_text_set(text, "KVSPLICE_VERIFY: component %u chunk %u, %" PRIu64 " bytes from %.150s over %s: %.300s",
	             flight->component, flight->chunk, flight->plan->bytes, link->name,
	             kvs_transports[flight->transport].name, why.s);
	return false;
}

/* One piece for the head of the queue. The lock is released while it is copied. True: something happened. */
static bool serve_piece(struct kvs_link *link, struct kvs_flight *flight)
{
	struct kvs_text text = {.s = ""};
	struct kvs_room *room = flight_room(link, flight);
	if (room == NULL || room->failed) {
		if (room == NULL)
			kvs_text_set(&text, "room %" PRIu64 " was closed at the decode", flight->room);
		fail_flight(link, flight, room == NULL ? text.s : room->text.s);
		return true;
	}
	if (!flight->started) {
		start_flight(link, flight);
		return true;
	}
	room->busy++;
	kvs_unlock();
	uint64_t began = kvs_now_ns();
	enum kvs_step step = flight_ops(flight)->pull(link, &flight->sink, &text);
	uint64_t ended = kvs_now_ns();
	bool same = step != KVS_STEP_DONE || !flight->verify || verified(link, flight, &text);
	kvs_lock();
	/* Only this thread ends flights and decode links, and a busy room is not freed: all three are still there. */
	room->busy--;
	bool in_flight = flight_ops(flight)->in_flight != NULL && flight_ops(flight)->in_flight(link);
	if (in_flight && flight->held == NULL) {
		flight->held = room;
		flight->held_ns = began;
		room->busy++;
	} else if (!in_flight) {
		if (step != KVS_STEP_IDLE || flight->held != NULL)
			flight->copy_ns += ended - (flight->held != NULL ? flight->held_ns : began);
		let_go(flight);
	}
	if (room->closing)
		pthread_cond_broadcast(&kvs_state.changed);
	switch (step) {
	case KVS_STEP_IDLE:
		return false;
	case KVS_STEP_PROGRESS:
		return true;
	case KVS_STEP_DONE:
		if (room->closing)
			return true; /* the next turn finds it closed */
		if (same && destination_same(link, room, flight->plan, flight->component, &text))
			complete_flight(link, flight, room);
		else
			fail_flight(link, flight, text.s);
		return true;
	case KVS_STEP_FAILED:
		hand_over(link, flight, text.s);
		return true;
	case KVS_STEP_BROKEN:
		kvs_link_drop(link, "%s", text.s);
		return true;
	}
	return false;
}

bool kvs_flights_serve(void)
{
	bool moved = false;
	spin_count = 0;
	for (struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		uint64_t end = 0;
		while (link->flights != NULL && !link->drop && serve_piece(link, link->flights)) {
			uint64_t now = kvs_now_ns();
			moved = true;
			end = end == 0 ? now + TURN_NS : end;
			if (now >= end)
				break;
		}
		if (link->flights != NULL && link->flights->started && !link->drop && spin_count < SPIN_LINKS &&
		    flight_ops(link->flights)->ready != NULL)
			spin_links[spin_count++] = link;
	}
	return moved;
}

int kvs_flights_expire(uint64_t now_ns)
{
	uint64_t most = (uint64_t)kvs_config_get()->timeout_ms * 1000000U + LATE_NS;
	int least = -1;
	for (struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		struct kvs_flight *next;
		for (struct kvs_flight *flight = link->flights; flight != NULL && !link->drop; flight = next) {
			struct kvs_text text;
			next = flight->next;
			if (now_ns < flight->asked_ns + most) {
				int ms = (int)((flight->asked_ns + most - now_ns) / 1000000) + 1;
				least = least < 0 || ms < least ? ms : least;
				continue;
			}
			kvs_text_set(&text,
			             "%.150s did not send all of component %u within %u ms (KVSPLICE_TIMEOUT_MS)",
			             link->name, flight->component, kvs_config_get()->timeout_ms);
			fail_flight(link, flight, text.s);
		}
	}
	return least;
}

bool kvs_flights_spin(void)
{
	uint64_t end = spin_count == 0 ? 0 : kvs_now_ns() + SPIN_NS;
	while (spin_count > 0 && kvs_now_ns() < end) {
		for (uint32_t i = 0; i < spin_count; i++) {
			if (flight_ops(spin_links[i]->flights)->ready(spin_links[i]))
				return true;
		}
		for (int i = 0; i < 16; i++)
			kvs_pause();
	}
	return false;
}

bool kvs_flights_held(void)
{
	for (const struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		if (link->flights != NULL && link->flights->held != NULL)
			return true;
	}
	return false;
}

bool kvs_flights_sleep(void)
{
	bool asleep = true;
	for (struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		const struct kvs_flight *flight = link->flights;
		if (flight == NULL || link->drop)
			continue;
		if (!flight->started || (flight_ops(flight)->wait != NULL && !flight_ops(flight)->wait(link)))
			asleep = false;
	}
	return asleep;
}
