/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cuda_ipc transport: the decode's agent reads the prefill's memory where it is. Legacy allocations are open since
 * the handshake; mapped ones are asked for when a pull needs them, a few descriptors at a time. The prefill's worker
 * has nothing to send: that its memory still is what it offered it has checked before the pull was asked for, and it
 * checks again when told that it is done.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_link.h"
#include "cuda_wake.h"

static bool ipc_probe(const struct kvs_link *link, struct kvs_text *reason)
{
	const struct kvs_cuda_link *cuda = link->cuda;
	if (link->endpoint->cuda == NULL || !link->peer_device_memory)
		kvs_text_set(reason, "the %s's memory is not on a GPU",
		             link->endpoint->cuda == NULL ? "decode" : "prefill");
	else if (!link->is_unix)
		kvs_text_set(reason, "no unix socket to the prefill: on another host, or its network is not shared");
	else if (cuda == NULL || cuda->offer == NULL)
		kvs_text_set(reason, "%s", cuda == NULL ? "no offer" : cuda->offer_text.s);
	else if (cuda->offer->reason.s[0] != '\0')
		kvs_text_set(reason, "%s", cuda->offer->reason.s);
	else
		return true;
	return false;
}

static uint32_t most_tensors(const struct kvs_layout *layout)
{
	uint32_t most = 0;
	for (uint32_t c = 0; c < layout->component_count; c++)
		most = layout->components[c].tensor_count > most ? layout->components[c].tensor_count : most;
	return most;
}

static bool ipc_open(struct kvs_link *link, struct kvs_text *text)
{
	struct kvs_cuda_link *cuda = link->cuda;
	struct kvs_cuda_gpu *gpu = link->endpoint->cuda->gpu;
	struct kvs_text why;
	cuda->sources = calloc((size_t)most_tensors(link->peer_layout) + 1, sizeof(*cuda->sources));
	cuda->method = (enum kvs_cuda_method)kvs_config_get()->cuda_copy;
	if (cuda->sources == NULL) {
		kvs_text_set(text, "out of memory");
		return false;
	}
	if (!kvs_cuda_wake_watch(text))
		return false;
	if (cuda->engine.gpu == NULL && !kvs_cuda_engine_open(&cuda->engine, gpu, text))
		return false;
	cuda->imports = kvs_cuda_imports_new(cuda->offer, link->peer_layout, gpu, &why);
	cuda->offer = NULL;
	if (cuda->imports != NULL)
		return true;
	bool apart = !kvs_identity_same_namespace(&kvs_state.self, &link->peer_identity);
	kvs_text_set(text, "%.300s%s", why.s,
	             apart ? " (the two are in different pid namespaces: share pid and IPC namespaces between the "
	                     "containers)"
	                   : "");
	return false;
}

/* Prefill: there is nothing to do. The agent answers what the decode asks. */
static bool ipc_send(struct kvs_link *link, struct kvs_request *request, uint64_t stream, struct kvs_text *text)
{
	(void)link;
	(void)request;
	(void)stream;
	(void)text;
	return true;
}

static void ask(struct kvs_link *link, uint64_t stream, const uint32_t *list, uint32_t count)
{
	struct kvs_writer body = {.data = NULL};
	kvs_put_u64(&body, stream);
	kvs_put_u32(&body, count);
	for (uint32_t i = 0; i < count; i++)
		kvs_put_u32(&body, list[i]);
	kvs_lock();
	kvs_link_send(link, KVS_MESSAGE_CUDA_ASK, &body, NULL, 0);
	kvs_unlock();
}

/* Looks whether the piece in flight has ended, and puts the next one into the stream. */
static enum kvs_step next_piece(struct kvs_cuda_link *cuda, struct kvs_sink *sink, struct kvs_text *text)
{
	struct kvs_cuda_engine *engine = &cuda->engine;
	bool was_running = engine->running;
	if (was_running && !kvs_cuda_engine_poll(engine, text))
		return KVS_STEP_FAILED;
	if (engine->running)
		return KVS_STEP_IDLE; /* its end is an event */
	sink->position = engine->position;
	if (sink->position == sink->plan->bytes)
		return KVS_STEP_DONE;
	/* The next one is not begun here: between two the room may be closed. */
	if (was_running)
		return KVS_STEP_PROGRESS;
	return kvs_cuda_engine_launch(engine, text) ? KVS_STEP_IDLE : KVS_STEP_FAILED;
}

static enum kvs_step ipc_pull(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text)
{
	struct kvs_cuda_link *cuda = link->cuda;
	if (cuda->failed.s[0] != '\0') {
		*text = cuda->failed;
		return KVS_STEP_FAILED;
	}
	if (cuda->asked != 0)
		return KVS_STEP_IDLE; /* the answer is an event */
	if (cuda->stream != sink->stream) {
		uint32_t list[KVS_CUDA_ASK_MAX];
		uint32_t missing = kvs_cuda_imports_missing(cuda->imports, sink->plan, sink->component, kvs_now_ns(),
		                                            list, KVS_CUDA_ASK_MAX);
		if (missing > 0) {
			cuda->asked = sink->stream;
			ask(link, sink->stream, list, missing);
			return KVS_STEP_IDLE;
		}
		kvs_cuda_imports_sources(cuda->imports, sink->component, cuda->sources);
		if (!kvs_cuda_engine_begin(&cuda->engine, sink->plan, KVS_GPU_DIRECT, cuda->sources, cuda->method,
		                           text))
			return KVS_STEP_FAILED;
		cuda->stream = sink->stream;
	}
	return next_piece(cuda, sink, text);
}

static bool ipc_in_flight(const struct kvs_link *link)
{
	return link->cuda != NULL && link->cuda->engine.running;
}

static bool ipc_ready(const struct kvs_link *link)
{
	return ipc_in_flight(link) && link->cuda->engine.wakes != kvs_cuda_wakes();
}

static void ipc_close(struct kvs_link *link, bool ok)
{
	struct kvs_cuda_link *cuda = link->cuda;
	(void)ok;
	if (cuda == NULL)
		return;
	cuda->asked = 0;
	cuda->failed.s[0] = '\0';
	kvs_linear_end(link);
}

const struct kvs_transport_ops kvs_transport_cuda_ipc = {
        .probe = ipc_probe,
        .open = ipc_open,
        .send = ipc_send,
        .pull = ipc_pull,
        .ready = ipc_ready,
        .in_flight = ipc_in_flight,
        .close = ipc_close,
};

static void close_all(const int *fds, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		close(fds[i]);
}

/*
 * Prefill: the decode asks for what it maps allocations from. The answer has all of it or none, with the reason:
 * descriptors beside the message and fabric handles at its end, both in the order of the list.
 */
static bool on_ask(struct kvs_link *link, struct kvs_reader *body, struct kvs_text *text)
{
	struct kvs_text why = {.s = ""};
	uint32_t list[KVS_CUDA_ASK_MAX], count = 0, fd_count = 0;
	struct kvs_cuda_shareable made[KVS_CUDA_ASK_MAX];
	int fds[KVS_CUDA_ASK_MAX];
	uint64_t stream = kvs_get_u64(body);
	uint32_t asked = kvs_get_u32(body);
	if (asked == 0 || asked > KVS_CUDA_ASK_MAX || body->left != asked * sizeof(uint32_t) ||
	    link->endpoint->cuda == NULL) {
		kvs_text_set(text, "a request for %u descriptors of GPU memory makes no sense", asked);
		return false;
	}
	for (uint32_t i = 0; i < asked; i++)
		list[i] = kvs_get_u32(body);
	for (; count < asked && kvs_cuda_export(link->endpoint->cuda, list[count], &made[count], &why); count++) {
		if (made[count].fd >= 0)
			fds[fd_count++] = made[count].fd;
	}
	struct kvs_writer answer = {.data = NULL};
	bool all = count == asked;
	kvs_put_u64(&answer, stream);
	kvs_put_u32(&answer, all ? count : 0);
	for (uint32_t i = 0; all && i < count; i++)
		kvs_put_u32(&answer, list[i]);
	kvs_put_string(&answer, why.s);
	for (uint32_t i = 0; all && i < count; i++) {
		if (made[i].fd < 0)
			kvs_put_bytes(&answer, made[i].fabric.bytes, KVS_CU_FABRIC_SIZE);
	}
	kvs_link_send(link, KVS_MESSAGE_CUDA_FDS, &answer, fds, all ? fd_count : 0);
	close_all(fds, fd_count);
	return true;
}

/* Read the answer; false: it makes no sense. The descriptors are in fds. */
static bool read_answer(const struct kvs_cuda_imports *imports, struct kvs_reader *body, const int *fds,
                        uint32_t fd_count, uint32_t *list_p, struct kvs_cuda_shareable *made_p, uint32_t *count_p,
                        struct kvs_text *why)
{
	uint32_t count = kvs_get_u32(body), used = 0;
	*count_p = count;
	if (imports == NULL || count > KVS_CUDA_ASK_MAX)
		return false;
	for (uint32_t i = 0; i < count; i++)
		list_p[i] = kvs_get_u32(body);
	kvs_get_text(body, why);
	for (uint32_t i = 0; i < count; i++) {
		bool by_fd = kvs_cuda_imports_by_fd(imports, list_p[i]);
		if (by_fd && used == fd_count)
			return false;
		made_p[i] = (struct kvs_cuda_shareable){.fd = by_fd ? fds[used++] : -1};
		if (!by_fd)
			kvs_get_bytes(body, made_p[i].fabric.bytes, KVS_CU_FABRIC_SIZE);
	}
	return used == fd_count && !body->failed && body->left == 0;
}

/* Decode: they have come, or do not. */
static bool on_fds(struct kvs_link *link, struct kvs_reader *body, struct kvs_text *text)
{
	struct kvs_cuda_link *cuda = link->cuda;
	struct kvs_text why = {.s = ""};
	uint32_t list[KVS_CUDA_ASK_MAX], count = 0;
	struct kvs_cuda_shareable made[KVS_CUDA_ASK_MAX];
	int fds[KVS_CUDA_ASK_MAX];
	uint32_t fd_count = link->conn.in_fd_count;
	uint64_t stream = kvs_get_u64(body);
	memcpy(fds, link->conn.in_fds, fd_count * sizeof(fds[0]));
	link->conn.in_fd_count = 0;
	if (!read_answer(cuda == NULL ? NULL : cuda->imports, body, fds, fd_count, list, made, &count, &why)) {
		close_all(fds, fd_count);
		kvs_text_set(text, "%u descriptors for %u allocations of GPU memory make no sense", fd_count, count);
		return false;
	}
	bool ok = count > 0;
	for (uint32_t i = 0; i < count && ok; i++)
		ok = kvs_cuda_imports_map(cuda->imports, list[i], &made[i], &why);
	close_all(fds, fd_count);
	if (stream != cuda->asked)
		return true; /* of a pull that has ended: what was mapped is let go when it is idle */
	cuda->asked = 0;
	if (!ok)
		kvs_text_set(&cuda->failed, "GPU memory of the prefill cannot be mapped: %.300s", why.s);
	return true;
}

bool kvs_cuda_message(struct kvs_link *link, uint16_t type, struct kvs_reader *body, struct kvs_text *text)
{
	if (type == KVS_MESSAGE_CUDA_ASK && link->role == KVS_ROLE_PREFILL && link->state == KVS_LINK_READY)
		return on_ask(link, body, text);
	if (type == KVS_MESSAGE_CUDA_FDS && link->role == KVS_ROLE_DECODE && link->state == KVS_LINK_READY)
		return on_fds(link, body, text);
	return false;
}

int kvs_cuda_expire(uint64_t now_ns)
{
	int least = -1;
	for (struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		struct kvs_cuda_link *cuda = link->cuda;
		if (cuda == NULL || cuda->imports == NULL || cuda->imports->mapped == 0)
			continue;
		int ms = (int)(KVS_CUDA_IDLE_NS / 1000000U);
		if (cuda->stream == 0 && cuda->asked == 0)
			ms = kvs_cuda_imports_expire(cuda->imports, now_ns);
		if (ms >= 0 && (least < 0 || ms < least))
			least = ms;
	}
	return least;
}
