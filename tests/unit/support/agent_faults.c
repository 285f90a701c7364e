/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "agent_faults.h"

#include <unistd.h>

/* They ride on the staging memory that the host transport opens as a later row of the route. */
static bool probe(const struct kvs_link *link, struct kvs_text *reason)
{
	return kvs_transport_host.probe(link, reason);
}

static bool open_nothing(struct kvs_link *link, struct kvs_text *text)
{
	(void)link;
	(void)text;
	return true;
}

static bool send_all(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	return kvs_transport_host.send(link, request, stream, text);
}

static enum kvs_step pull(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text)
{
	return kvs_transport_host.pull(link, sink, text);
}

static bool ready(const struct kvs_link *link)
{
	return kvs_transport_host.ready(link);
}

static bool wait(struct kvs_link *link)
{
	return kvs_transport_host.wait(link);
}

static void close_stream(struct kvs_link *link, bool ok)
{
	kvs_transport_host.close(link, ok);
}

static enum kvs_step slow_pull(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text)
{
	enum kvs_step step = kvs_transport_host.pull(link, sink, text);
	if (step != KVS_STEP_IDLE)
		usleep(5000);
	return step;
}

static enum kvs_step failing_pull(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text)
{
	if (sink->position < 3u * KVS_SLOT_SIZE)
		return kvs_transport_host.pull(link, sink, text);
	kvs_text_set(text, "injected at the decode");
	return KVS_STEP_FAILED;
}

static bool failing_send(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	struct kvs_cursor cursor = {.copy = 0};
	for (uint64_t left = request->plan->bytes / 2; left > 0 && !kvs_request_stopped(request);) {
		uint8_t *slot;
		if (kvs_staging_empty(&link->staging, &slot) != KVS_SLOT_READY)
			continue;
		size_t size = left < KVS_SLOT_SIZE ? (size_t)left : KVS_SLOT_SIZE;
		kvs_staging_commit(&link->staging, stream, (uint32_t)kvs_copy_pack(request->plan, &cursor, slot, size));
		left -= size;
	}
	kvs_text_set(text, "injected at the prefill");
	return false;
}

atomic_bool fault_changes_byte;

static bool changing_send(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	struct kvs_cursor cursor = {.copy = 0};
	bool change = atomic_load(&fault_changes_byte);
	for (uint64_t left = request->plan->bytes; left > 0 && !kvs_request_stopped(request);) {
		uint8_t *slot;
		if (kvs_staging_empty(&link->staging, &slot) != KVS_SLOT_READY)
			continue;
		size_t size = left < KVS_SLOT_SIZE ? (size_t)left : KVS_SLOT_SIZE;
		(void)kvs_copy_pack(request->plan, &cursor, slot, size);
		slot[size / 2] ^= change ? 0x10 : 0;
		change = false;
		kvs_staging_commit(&link->staging, stream, (uint32_t)size);
		left -= size;
	}
	kvs_text_set(text, "stopped");
	return !kvs_request_stopped(request);
}

static bool insane_send(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	(void)request;
	(void)text;
	link->staging.index += 1000; /* far more than there are slots */
	kvs_staging_commit(&link->staging, stream, 4096);
	while (!kvs_request_stopped(request))
		usleep(1000);
	return false;
}

static bool silent_send(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	(void)link;
	(void)stream;
	(void)text;
	while (!kvs_request_stopped(request) && kvs_now_ns() < request->deadline_ns)
		usleep(1000);
	return false;
}

#define OPS(send_function, pull_function) \
	{ \
		.probe = probe, .open = open_nothing, .send = send_function, .pull = pull_function, .ready = ready, \
		.wait = wait, .close = close_stream, \
	}

static const struct kvs_transport_ops slow_ops = OPS(send_all, slow_pull);
static const struct kvs_transport_ops pull_ops = OPS(send_all, failing_pull);
static const struct kvs_transport_ops send_ops = OPS(failing_send, pull);
static const struct kvs_transport_ops insane_ops = OPS(insane_send, pull);
static const struct kvs_transport_ops silent_ops = OPS(silent_send, pull);

void fault_slow(void)
{
	kvs_transports[KVS_TRANSPORT_RDMA].ops = &slow_ops;
}

void fault_pull(void)
{
	kvs_transports[KVS_TRANSPORT_RDMA].ops = &pull_ops;
}

void fault_send(void)
{
	kvs_transports[KVS_TRANSPORT_RDMA].ops = &send_ops;
}

void fault_insane(void)
{
	kvs_transports[KVS_TRANSPORT_RDMA].ops = &insane_ops;
}

void fault_silent(void)
{
	kvs_transports[KVS_TRANSPORT_RDMA].ops = &silent_ops;
}

static bool host_open(struct kvs_link *link, struct kvs_text *text)
{
	return kvs_transport_host.open(link, text);
}

static const struct kvs_transport_ops broken_host_ops = {
        .probe = probe,
        .open = host_open,
        .send = failing_send,
        .pull = pull,
        .ready = ready,
        .wait = wait,
        .close = close_stream,
};

static const struct kvs_transport_ops changing_host_ops = {
        .probe = probe,
        .open = host_open,
        .send = changing_send,
        .pull = pull,
        .ready = ready,
        .wait = wait,
        .close = close_stream,
};

void fault_change(void)
{
	kvs_transports[KVS_TRANSPORT_HOST].ops = &changing_host_ops;
}

void fault_all(void)
{
	kvs_transports[KVS_TRANSPORT_RDMA].ops = &pull_ops;
	kvs_transports[KVS_TRANSPORT_HOST].ops = &broken_host_ops;
}
