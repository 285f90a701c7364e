/* SPDX-License-Identifier: Apache-2.0 */
/* The host transport: the worker packs into shared staging, the agent unpacks from it, two cores at work. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>

#include "cuda_link.h"
#include "link.h"

#define SPIN_NS 20000u /* about the time that the other side needs for half a slot */

static bool host_probe(const struct kvs_link *link, struct kvs_text *reason)
{
	if (!link->is_unix) {
		kvs_text_set(reason, "no unix socket to pass a descriptor over");
		return false;
	}
	return true;
}

static bool host_open(struct kvs_link *link, struct kvs_text *text)
{
	return kvs_cuda_open_linear(link, text) &&
	       kvs_staging_create(&link->staging, kvs_config_get()->staging_bytes, text);
}

/* Wait for an empty slot. False: the stream is to be left, or text says what is wrong. */
static bool wait_for_slot(struct kvs_link *link, struct kvs_request *request, uint8_t **slot_p, struct kvs_text *text)
{
	uint64_t spin_end = 0;
	for (;;) {
		enum kvs_slot slot = kvs_staging_empty(&link->staging, slot_p);
		if (slot == KVS_SLOT_READY)
			return true;
		if (slot == KVS_SLOT_INSANE) {
			kvs_text_set(text, "the index in the shared staging memory makes no sense");
			return false;
		}
		if (kvs_request_stopped(request))
			return false;
		uint64_t now = kvs_now_ns();
		if (spin_end == 0)
			spin_end = now + SPIN_NS;
		if (now < spin_end) {
			for (int i = 0; i < 32; i++)
				kvs_pause();
			continue;
		}
		if (now >= request->deadline_ns) {
			kvs_text_set(text, "the decode took nothing from the staging memory in time");
			return false;
		}
		if (!kvs_staging_arm_space(&link->staging))
			continue;
		struct pollfd fds[2] = {{.fd = link->staging.space, .events = POLLIN},
		                        {.fd = link->worker_wake, .events = POLLIN}};
		int ms = (int)((request->deadline_ns - now) / 1000000) + 1;
		(void)poll(fds, 2, ms); /* an error is as good as an event: the loop looks at everything again */
		kvs_event_clear(link->staging.space);
		kvs_event_clear(link->worker_wake);
		spin_end = 0;
	}
}

static bool host_send(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	struct kvs_cursor cursor = {.copy = 0};
	uint64_t left = request->plan->bytes;
	if (link->staging.shared == NULL) {
		kvs_text_set(text, "%s", link->staging_text.s);
		return false;
	}
	while (left > 0) {
		uint8_t *slot;
		if (kvs_request_stopped(request) || !wait_for_slot(link, request, &slot, text))
			break;
		size_t size = left < link->staging.slot_size ? (size_t)left : link->staging.slot_size;
		if (!kvs_linear_get(link, request->plan, stream, &cursor, slot, size, text))
			break;
		kvs_staging_commit(&link->staging, stream, (uint32_t)size);
		left -= size;
	}
	kvs_linear_end(link);
	return left == 0;
}

static enum kvs_step host_pull(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text)
{
	const uint8_t *slot;
	uint64_t stream;
	uint32_t length;
	enum kvs_slot filled = kvs_staging_filled(&link->staging, &slot, &stream, &length);
	if (filled == KVS_SLOT_NONE)
		return KVS_STEP_IDLE;
	if (filled == KVS_SLOT_READY && stream != sink->stream) { /* left behind by a pull that ended early */
		kvs_staging_release(&link->staging);
		return KVS_STEP_PROGRESS;
	}
	if (filled == KVS_SLOT_INSANE || length > sink->plan->bytes - sink->position) {
		kvs_text_set(text, "what the prefill wrote into the shared staging memory makes no sense");
		return KVS_STEP_BROKEN;
	}
	bool placed = kvs_linear_put(link, sink, slot, length, text);
	kvs_staging_release(&link->staging);
	if (!placed)
		return KVS_STEP_FAILED;
	sink->position += length;
	return sink->position == sink->plan->bytes ? KVS_STEP_DONE : KVS_STEP_PROGRESS;
}

static bool host_ready(const struct kvs_link *link)
{
	const uint8_t *slot;
	uint64_t stream;
	uint32_t length;
	struct kvs_staging copy = link->staging;
	return kvs_staging_filled(&copy, &slot, &stream, &length) != KVS_SLOT_NONE;
}

static bool host_wait(struct kvs_link *link)
{
	return kvs_staging_arm(&link->staging);
}

static void host_close(struct kvs_link *link, bool ok)
{
	/* Slots of the ended stream are skipped by their number; the ring goes on. */
	(void)ok;
	if (link->role == KVS_ROLE_DECODE)
		kvs_linear_end(link);
}

const struct kvs_transport_ops kvs_transport_host = {
        .probe = host_probe,
        .open = host_open,
        .send = host_send,
        .pull = host_pull,
        .ready = host_ready,
        .wait = host_wait,
        .close = host_close,
};
