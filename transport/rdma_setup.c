/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The setup thread: registering memory and making queue pairs may take seconds, and nobody waits for it. It runs while
 * there is something of ours, takes jobs under the lock and works without it.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
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

/* ---- the end of an endpoint ---- */

void kvs_rdma_forget_endpoint(uint64_t endpoint)
{
	kvs_rdma_memory_remove_all(endpoint);
	if (!kvs_rdma_memory_has(endpoint))
		return;
	if (add_job(JOB_RELEASE, 0) == NULL)
		return;
	while (running && kvs_rdma_memory_has(endpoint))
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
	kvs_rdma_memory_put(rdma->memory);
	kvs_rdma_ready_free(&rdma->ready);
	free(rdma->tensor_first);
	free(rdma);
	kvs_rdma_memory_release();
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

void kvs_rdma_place(struct kvs_link *link, bool usable)
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

void kvs_rdma_give_up(struct kvs_link *link, const char *text)
{
	struct kvs_rdma *rdma = link->rdma;
	kvs_text_set(&rdma->text, "%s", text);
	rdma->state = KVS_RDMA_GIVEN_UP;
	kvs_rdma_place(link, false);
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
		kvs_rdma_give_up(link, "no memory or thread to set it up");
}

void kvs_rdma_broken(struct kvs_link *link, const char *text)
{
	struct kvs_rdma *rdma = link->rdma;
	kvs_text_set(&rdma->text, "%s", text);
	rdma->state = KVS_RDMA_BROKEN;
	if (rdma->pair.device != NULL && atomic_load(&rdma->pair.device->fatal)) {
		kvs_rdma_give_up(link, text);
		return;
	}
	if (++rdma->failures > KVS_RDMA_FAILURES) {
		struct kvs_text why;
		kvs_text_set(&why, "broken %u times in a row, the last time: %.400s", rdma->failures, text);
		kvs_rdma_give_up(link, why.s);
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
		kvs_rdma_give_up(link, "no memory or thread to set it up");
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

static void run_job(struct job *job)
{
	if (job->kind == JOB_DISCARD) {
		destroy(job->rdma);
		return;
	}
	if (job->kind == JOB_RELEASE) {
		kvs_rdma_memory_release();
		return;
	}
	struct kvs_link *link = hold_link(job->link);
	if (link == NULL)
		return;
	if (job->kind == JOB_BEGIN)
		kvs_rdma_do_begin(link);
	else if (job->kind == JOB_ACCEPT)
		kvs_rdma_do_accept(link, &job->connect);
	else
		kvs_rdma_do_finish(link, &job->ready);
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
	kvs_rdma_memory_forget();
	running = stopping = false;
	pthread_cond_init(&job_added, NULL);
	kvs_rdma_devices_forget();
}
