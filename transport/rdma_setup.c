/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The setup thread: registering memory and making queue pairs may take seconds, and nobody waits for it. It runs while
 * there is something of ours, takes jobs under the lock and works without it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "log.h"
#include "rdma.h"

enum job_kind {
	JOB_BEGIN,   /* decode: make a pair, send connect */
	JOB_ACCEPT,  /* prefill: make a pair to theirs, send ready */
	JOB_FINISH,  /* decode: connect ours */
	JOB_DISCARD, /* a link's things */
	JOB_RELEASE, /* memory that nobody needs */
};

struct job {
	struct job *next;
	enum job_kind kind;
	uint64_t link;
	struct kvs_rdma_connect connect;
	struct kvs_rdma_ready ready;
	struct kvs_rdma *rdma;
};

static struct job *jobs, **jobs_end = &jobs;
static struct kvs_rdma_memory *memories;
static pthread_cond_t job_added = PTHREAD_COND_INITIALIZER;
static bool running, stopping;

static void run_job(struct job *job);

static void *setup_main(void *unused)
{
	(void)unused;
	kvs_lock();
	for (;;) {
		while (jobs == NULL && !stopping)
			pthread_cond_wait(&job_added, &kvs_state.lock);
		struct job *job = jobs;
		if (job == NULL)
			break;
		jobs = job->next;
		if (jobs == NULL)
			jobs_end = &jobs;
		run_job(job);
		kvs_rdma_ready_free(&job->ready);
		free(job);
	}
	running = false;
	pthread_cond_broadcast(&kvs_state.changed);
	kvs_unlock();
	return NULL;
}

static bool start_thread(void)
{
	pthread_t thread;
	sigset_t all, before;
	if (running)
		return true;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int error = pthread_create(&thread, NULL, setup_main, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error != 0)
		return false;
	(void)pthread_setname_np(thread, "kvsplice-rdma");
	(void)pthread_detach(thread);
	running = true;
	return true;
}

/* NULL: no memory or no thread. */
static struct job *add_job(enum job_kind kind, uint64_t link)
{
	struct job *job = start_thread() ? calloc(1, sizeof(*job)) : NULL;
	if (job == NULL)
		return NULL;
	job->kind = kind;
	job->link = link;
	*jobs_end = job;
	jobs_end = &job->next;
	pthread_cond_signal(&job_added);
	return job;
}

/* ---- memory ---- */

/* The endpoint has no more use for it. */
static void remove_memory(struct kvs_rdma_memory *memory)
{
	if (memory->removed)
		return;
	memory->removed = true;
	memory->refs--;
}

/* The endpoint's set for a device; one reference is the caller's. NULL: out of memory. */
static struct kvs_rdma_memory *get_memory(const struct kvs_endpoint *endpoint, struct kvs_rdma_device *device)
{
	uint64_t epoch = kvs_cuda_memory_epoch(endpoint->cuda);
	struct kvs_rdma_memory *memory = memories;
	while (memory != NULL && (memory->endpoint != endpoint->id || memory->device != device || memory->removed ||
	                          memory->epoch != epoch)) {
		if (memory->endpoint == endpoint->id && memory->epoch != epoch)
			remove_memory(memory);
		memory = memory->next;
	}
	if (memory == NULL) {
		memory = calloc(1, sizeof(*memory));
		if (memory == NULL)
			return NULL;
		memory->endpoint = endpoint->id;
		memory->device = device;
		memory->epoch = epoch;
		memory->refs = 1;
		memory->next = memories;
		memories = memory;
	}
	memory->refs++;
	return memory;
}

/* Deregister what nobody refers to. The setup thread; the lock held, released meanwhile. */
static void release_memories(void)
{
	struct kvs_rdma_memory **at = &memories;
	while (*at != NULL) {
		struct kvs_rdma_memory *memory = *at;
		if (memory->refs > 0) {
			at = &memory->next;
			continue;
		}
		/* It stays in the list, for kvs_rdma_forget_endpoint waits for it; only this thread takes it out. */
		kvs_unlock();
		kvs_rdma_deregister(memory->device, &memory->pieces);
		kvs_lock();
		at = &memories;
		while (*at != memory)
			at = &(*at)->next;
		*at = memory->next;
		free(memory);
		pthread_cond_broadcast(&kvs_state.changed);
		at = &memories;
	}
}

static void put_memory(struct kvs_rdma_memory *memory)
{
	if (memory != NULL)
		memory->refs--;
}

static bool has_memory(uint64_t endpoint)
{
	for (const struct kvs_rdma_memory *memory = memories; memory != NULL; memory = memory->next) {
		if (memory->endpoint == endpoint)
			return true;
	}
	return false;
}

void kvs_rdma_forget_endpoint(uint64_t endpoint)
{
	for (struct kvs_rdma_memory *memory = memories; memory != NULL; memory = memory->next) {
		if (memory->endpoint == endpoint)
			remove_memory(memory);
	}
	if (!has_memory(endpoint))
		return;
	if (add_job(JOB_RELEASE, 0) == NULL)
		return;
	while (running && has_memory(endpoint))
		pthread_cond_wait(&kvs_state.changed, &kvs_state.lock);
}

/* ---- the end of a link's things ---- */

/* It has memory: kvs_rdma_free sees to that. */
static void destroy(struct kvs_rdma *rdma)
{
	struct kvs_rdma_device *device = rdma->memory->device;
	kvs_unlock();
	kvs_rdma_pair_destroy(&rdma->pair);
	if (rdma->slots_mr != NULL)
		device->verbs->dereg_mr(rdma->slots_mr);
	if (rdma->slots != NULL)
		munmap(rdma->slots, (size_t)rdma->slot_count * KVS_RDMA_SLOT_SIZE);
	kvs_lock();
	put_memory(rdma->memory);
	kvs_rdma_ready_free(&rdma->ready);
	free(rdma->tensor_first);
	free(rdma);
	release_memories();
}

void kvs_rdma_discard(struct kvs_rdma *rdma)
{
	struct job *job = add_job(JOB_DISCARD, 0);
	if (job != NULL)
		job->rdma = rdma;
	else
		kvs_log(KVS_LOG_WARN, "no memory to release a queue pair: it stays until the process ends");
}

/* ---- states of a link, the lock held ---- */

/* Where the configuration wants rdma among the link's transports, or behind all of them. */
static void place_in_route(struct kvs_link *link, bool usable)
{
	const struct kvs_config *config = kvs_config_get();
	uint32_t ordered[KVS_TRANSPORT_COUNT], count = 0;
	for (uint32_t i = 0; i < config->order_count; i++) {
		for (uint32_t k = 0; k < link->route_count; k++) {
			if (link->route[k] == config->order[i] && (usable || link->route[k] != KVS_TRANSPORT_RDMA))
				ordered[count++] = link->route[k];
		}
	}
	if (!usable)
		ordered[count++] = KVS_TRANSPORT_RDMA;
	if (count == link->route_count)
		memcpy(link->route, ordered, count * sizeof(ordered[0]));
}

static void give_up(struct kvs_link *link, const char *text)
{
	struct kvs_rdma *rdma = link->rdma;
	kvs_text_set(&rdma->text, "%s", text);
	rdma->state = KVS_RDMA_GIVEN_UP;
	place_in_route(link, false);
	kvs_log(KVS_LOG_WARN, "%s: rdma cannot be used: %s", link->name, text);
	kvs_agent_wake();
}

bool kvs_rdma_is_stale(const struct kvs_link *link)
{
	return link->rdma->memory != NULL && link->rdma->memory->epoch != kvs_cuda_memory_epoch(link->endpoint->cuda);
}

void kvs_rdma_begin(struct kvs_link *link)
{
	link->rdma->state = KVS_RDMA_SETUP;
	link->rdma->attempt++;
	if (add_job(JOB_BEGIN, link->id) == NULL)
		give_up(link, "no memory or thread to set it up");
}

void kvs_rdma_broken(struct kvs_link *link, const char *text)
{
	struct kvs_rdma *rdma = link->rdma;
	kvs_text_set(&rdma->text, "%s", text);
	rdma->state = KVS_RDMA_BROKEN;
	if (rdma->pair.device != NULL && atomic_load(&rdma->pair.device->fatal)) {
		give_up(link, text);
		return;
	}
	if (++rdma->failures > KVS_RDMA_FAILURES) {
		struct kvs_text why;
		kvs_text_set(&why, "broken %u times in a row, the last time: %.400s", rdma->failures, text);
		give_up(link, why.s);
		return;
	}
	kvs_rdma_begin(link);
}

void kvs_rdma_accept(struct kvs_link *link, const struct kvs_rdma_connect *msg)
{
	struct job *job = add_job(JOB_ACCEPT, link->id);
	if (job != NULL)
		job->connect = *msg;
	else
		kvs_link_drop(link, "no memory or thread to set up rdma");
}

void kvs_rdma_finish(struct kvs_link *link, struct kvs_rdma_ready *msg)
{
	struct job *job = add_job(JOB_FINISH, link->id);
	if (job == NULL) {
		give_up(link, "no memory or thread to set it up");
		return;
	}
	job->ready = *msg;
	*msg = (struct kvs_rdma_ready){.attempt = 0};
}

/* ---- the jobs ---- */

/* The link and its rdma, still wanted; one reference to the link is the caller's. */
static struct kvs_link *hold_link(uint64_t id)
{
	struct kvs_link *link = kvs_link_find(id);
	if (link == NULL || link->rdma == NULL || link->state != KVS_LINK_READY || link->drop)
		return NULL;
	link->refs++;
	return link;
}

/* May messages still be sent for it? */
static bool is_alive(const struct kvs_link *link)
{
	return link->state == KVS_LINK_READY && !link->drop && kvs_link_find(link->id) == link;
}

/* Memory registered and a new pair made. The lock held, released meanwhile. False with text. */
static bool prepare(struct kvs_link *link, const struct kvs_rdma_port *port, bool reader, struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	struct kvs_rdma_memory *memory = rdma->memory, *before = NULL;
	struct kvs_cuda_memory *gpu = link->endpoint->cuda;
	if (memory == NULL || kvs_rdma_is_stale(link)) {
		memory = get_memory(link->endpoint, port->device);
		if (memory == NULL) {
			kvs_text_set(text, "out of memory");
			return false;
		}
		before = rdma->memory;
		rdma->memory = memory;
	}
	struct kvs_rdma_pair old = rdma->pair, made = {.device = NULL};
	rdma->pair = made;
	bool registered = memory->registered;
	kvs_unlock();
	kvs_rdma_pair_destroy(&old);
	int access = reader ? KVS_IBV_ACCESS_LOCAL_WRITE : KVS_IBV_ACCESS_REMOTE_READ;
	bool ok = (gpu == NULL || !reader || kvs_rdma_gpu_ordered(gpu, &memory->flush, text)) &&
	          (registered ||
	           kvs_rdma_register(port->device, link->endpoint->layout, gpu, access, &memory->pieces, text)) &&
	          kvs_rdma_pair_make(&made, port, reader, text);
	kvs_lock();
	memory->registered = registered || memory->pieces.count > 0;
	rdma->pair = made;
	put_memory(before);
	release_memories();
	return ok;
}

static void begin(struct kvs_link *link)
{
	struct kvs_rdma *rdma = link->rdma;
	const struct kvs_rdma_port *port = &rdma->local.ports[rdma->match.local_port];
	const struct kvs_rdma_port *remote = &rdma->remote.ports[rdma->match.remote_port];
	struct kvs_text text = {.s = ""};
	bool prepared = prepare(link, port, true, &text);
	if (!is_alive(link))
		return; /* what was made goes with it */
	if (!prepared) {
		give_up(link, text.s);
		return;
	}
	if (!kvs_watch_add(rdma->pair.channel->fd, EPOLLIN, KVS_WATCH_RDMA, link->id)) {
		kvs_text_set(&text, "epoll: %m");
		give_up(link, text.s);
		return;
	}
	int initiator = port->device->attr.max_qp_init_rd_atom;
	uint32_t depth = initiator > 0 ? (uint32_t)initiator : 1;
	depth = remote->rd_atom > 0 && remote->rd_atom < depth ? remote->rd_atom : depth;
	struct kvs_rdma_connect msg = {
	        .attempt = rdma->attempt,
	        .port = rdma->match.remote_port,
	        .gid = rdma->match.remote_gid,
	        .lid = port->lid,
	        .mtu = port->mtu < remote->mtu ? port->mtu : remote->mtu,
	        .rd_atom = depth < UINT8_MAX ? depth : UINT8_MAX,
	        .qp = rdma->pair.qp->qp_num,
	        .psn = rdma->pair.psn,
	};
	memcpy(msg.raw_gid, port->gids[rdma->match.local_gid].raw, sizeof(msg.raw_gid));
	struct kvs_writer body = {.data = NULL};
	kvs_put_rdma_connect(&body, &msg);
	kvs_link_send(link, KVS_MESSAGE_RDMA_CONNECT, &body, NULL, 0);
}

/* Does this link ever slice whole source items apart? Only then are slots of use. */
static bool needs_slots(const struct kvs_link *link)
{
	for (uint32_t c = 0; c < link->endpoint->layout->component_count; c++) {
		if (link->verdicts[c].action == KVS_ACT_SLICE &&
		    link->endpoint->layout->tp_size < link->peer_layout->tp_size)
			return true;
	}
	return false;
}

/* The lock held, released meanwhile. */
static bool make_slots(struct kvs_link *link, struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	const struct kvs_rdma_device *device = rdma->memory->device;
	uint64_t count = kvs_config_get()->staging_bytes / KVS_RDMA_SLOT_SIZE;
	if (rdma->slots != NULL || !needs_slots(link))
		return true;
	count = count < 2 ? 2 : count;
	count = count > KVS_RDMA_SLOTS ? KVS_RDMA_SLOTS : count;
	size_t size = (size_t)count * KVS_RDMA_SLOT_SIZE;
	kvs_unlock();
	void *slots = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct kvs_ibv_mr *mr = NULL;
	if (slots == MAP_FAILED) {
		kvs_text_set(text, "%zu bytes of staging memory: %m", size);
	} else {
		/* A forked child must not take these pages from under the device; it has no use for them either. */
		(void)madvise(slots, size, MADV_DONTFORK);
		errno = EIO;
		mr = device->verbs->reg_mr(device->pd, slots, size, KVS_IBV_ACCESS_REMOTE_READ);
		if (mr == NULL) {
			kvs_rdma_register_error(text, (uint64_t)(uintptr_t)slots, size, errno);
			munmap(slots, size);
		}
	}
	kvs_lock();
	if (mr == NULL)
		return false;
	rdma->slots = slots;
	rdma->slots_mr = mr;
	rdma->slot_count = (uint32_t)count;
	return true;
}

/* Addresses of all tensors, one after the other. */
static bool list_tensors(const struct kvs_layout *layout, struct kvs_rdma_ready *msg)
{
	size_t count = 0;
	for (uint32_t c = 0; c < layout->component_count; c++)
		count += layout->components[c].tensor_count;
	msg->tensors = calloc(count + 1, sizeof(*msg->tensors));
	if (msg->tensors == NULL)
		return false;
	for (uint32_t c = 0; c < layout->component_count; c++) {
		for (uint32_t t = 0; t < layout->components[c].tensor_count; t++)
			msg->tensors[msg->tensor_count++] = layout->components[c].tensors[t].address;
	}
	return true;
}

static bool accept_pair(struct kvs_link *link, const struct kvs_rdma_connect *msg, struct kvs_rdma_ready *answer,
                        struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	if (msg->port >= rdma->local.port_count || msg->gid >= rdma->local.ports[msg->port].gid_count) {
		kvs_text_set(text, "port %u GID %u was not offered", msg->port, msg->gid);
		return false;
	}
	const struct kvs_rdma_port *port = &rdma->local.ports[msg->port];
	if (rdma->memory != NULL && rdma->memory->device != port->device) {
		kvs_text_set(text, "the port is of another device than before");
		return false;
	}
	struct kvs_rdma_path path = {.port = port,
	                             .gid = msg->gid,
	                             .lid = msg->lid,
	                             .raw_gid = msg->raw_gid,
	                             .qp = msg->qp,
	                             .psn = msg->psn,
	                             .mtu = msg->mtu,
	                             .rd_atom = msg->rd_atom < port->rd_atom ? msg->rd_atom : port->rd_atom,
	                             .service_level = kvs_config_get()->rdma_service_level,
	                             .traffic_class = kvs_config_get()->rdma_traffic_class};
	if (!prepare(link, port, false, text) || !make_slots(link, text))
		return false;
	kvs_unlock();
	bool ok = kvs_rdma_pair_connect(&rdma->pair, &path, false, text);
	kvs_lock();
	if (!ok)
		return false;
	answer->qp = rdma->pair.qp->qp_num;
	answer->psn = rdma->pair.psn;
	answer->rd_atom = path.rd_atom;
	if (rdma->slots != NULL) {
		answer->slot_count = rdma->slot_count;
		answer->slot_size = KVS_RDMA_SLOT_SIZE;
		answer->slots_address = (uint64_t)(uintptr_t)rdma->slots;
		answer->slots_key = rdma->slots_mr->rkey;
	}
	answer->pieces = rdma->memory->pieces; /* for the encoder only */
	return list_tensors(link->endpoint->layout, answer);
}

static void accept(struct kvs_link *link, const struct kvs_rdma_connect *msg)
{
	struct kvs_rdma_ready answer = {.attempt = msg->attempt};
	struct kvs_writer body = {.data = NULL};
	answer.ok = accept_pair(link, msg, &answer, &answer.text) ? 1 : 0;
	if (!is_alive(link)) {
		free(answer.tensors);
		return;
	}
	if (answer.ok == 0) {
		answer.pieces = (struct kvs_rdma_pieces){.count = 0};
		kvs_text_set(&link->rdma->text, "%s", answer.text.s);
		kvs_log(KVS_LOG_WARN, "%s: rdma cannot be used: %s", link->name, answer.text.s);
	}
	kvs_put_rdma_ready(&body, &answer);
	kvs_link_send(link, KVS_MESSAGE_RDMA_READY, &body, NULL, 0);
	free(answer.tensors);
}

/* Its tensors must be those of its layout. */
static bool index_tensors(struct kvs_rdma *rdma, const struct kvs_layout *peer, uint32_t tensor_count)
{
	uint32_t count = 0;
	if (rdma->tensor_first == NULL)
		rdma->tensor_first = calloc((size_t)peer->component_count + 1, sizeof(*rdma->tensor_first));
	if (rdma->tensor_first == NULL)
		return false;
	for (uint32_t c = 0; c < peer->component_count; c++) {
		rdma->tensor_first[c] = count;
		count += peer->components[c].tensor_count;
	}
	return count == tensor_count;
}

static void finish(struct kvs_link *link, struct kvs_rdma_ready *msg)
{
	struct kvs_rdma *rdma = link->rdma;
	struct kvs_text text = {.s = ""};
	const struct kvs_rdma_port *port = &rdma->local.ports[rdma->match.local_port];
	const struct kvs_rdma_port *remote = &rdma->remote.ports[rdma->match.remote_port];
	if (msg->attempt != rdma->attempt || rdma->state != KVS_RDMA_SETUP || rdma->pair.qp == NULL)
		return; /* of an attempt that is over */
	if (msg->ok == 0 || !index_tensors(rdma, link->peer_layout, msg->tensor_count)) {
		kvs_text_set(&text, "at the prefill: %.400s",
		             msg->ok == 0 ? msg->text.s : "its table of tensors is not that of its layout");
		give_up(link, text.s);
		return;
	}
	int initiator = port->device->attr.max_qp_init_rd_atom;
	struct kvs_rdma_path path = {.port = port,
	                             .gid = rdma->match.local_gid,
	                             .lid = remote->lid,
	                             .raw_gid = remote->gids[rdma->match.remote_gid].raw,
	                             .qp = msg->qp,
	                             .psn = msg->psn,
	                             .mtu = port->mtu < remote->mtu ? port->mtu : remote->mtu,
	                             .rd_atom = msg->rd_atom,
	                             .service_level = kvs_config_get()->rdma_service_level,
	                             .traffic_class = kvs_config_get()->rdma_traffic_class};
	if (initiator > 0 && path.rd_atom > (uint32_t)initiator)
		path.rd_atom = (uint32_t)initiator;
	kvs_unlock();
	bool ok = kvs_rdma_pair_connect(&rdma->pair, &path, true, &text);
	kvs_lock();
	if (!is_alive(link))
		return;
	if (!ok) {
		give_up(link, text.s);
		return;
	}
	kvs_rdma_ready_free(&rdma->ready);
	rdma->ready = *msg;
	*msg = (struct kvs_rdma_ready){.attempt = 0};
	rdma->state = KVS_RDMA_UP;
	place_in_route(link, true);
	kvs_log(KVS_LOG_INFO,
	        "%s: rdma is up: %s port %u, GID index %u, MTU %u, depth %u, scatter %u, %u READs at a time, %u "
	        "regions",
	        link->name, port->device->name, port->number, port->gids[path.gid].index, 128U << path.mtu,
	        rdma->pair.depth, rdma->pair.sge, path.rd_atom, rdma->memory->pieces.count);
	kvs_agent_wake();
}

static void run_job(struct job *job)
{
	if (job->kind == JOB_DISCARD) {
		destroy(job->rdma);
		return;
	}
	if (job->kind == JOB_RELEASE) {
		release_memories();
		return;
	}
	struct kvs_link *link = hold_link(job->link);
	if (link == NULL)
		return;
	if (job->kind == JOB_BEGIN)
		begin(link);
	else if (job->kind == JOB_ACCEPT)
		accept(link, &job->connect);
	else
		finish(link, &job->ready);
	kvs_link_unref(link);
}

void kvs_rdma_stop(void)
{
	kvs_lock();
	stopping = true;
	pthread_cond_signal(&job_added);
	while (running)
		pthread_cond_wait(&kvs_state.changed, &kvs_state.lock);
	stopping = false;
	kvs_rdma_devices_close();
	kvs_unlock();
}

void kvs_rdma_after_fork_in_child(void)
{
	for (const struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		if (link->rdma != NULL && link->rdma->pair.channel != NULL)
			close(link->rdma->pair.channel->fd);
	}
	jobs = NULL;
	jobs_end = &jobs;
	memories = NULL;
	running = stopping = false;
	pthread_cond_init(&job_added, NULL);
	kvs_rdma_devices_forget();
}
