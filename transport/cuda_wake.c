/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "cuda_wake.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "link.h"

/*
 * Made with the first GPU transfer and never closed: a lost device may call late, when the agent has ended. Nobody
 * reads it: watched for edges, every write is an event of its own.
 */
static _Atomic int event = -1;
static _Atomic uint64_t wakes;

bool kvs_cuda_wake_watch(struct kvs_text *text)
{
	if (event < 0)
		event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (event >= 0 && (kvs_watch_add(event, EPOLLIN | EPOLLET, KVS_WATCH_WAKE, 0) || errno == EEXIST))
		return true;
	kvs_text_set(text, "no eventfd for the GPU's copies: %m");
	return false;
}

void kvs_cuda_wake(void *unused)
{
	int error = errno;
	(void)unused;
	atomic_fetch_add(&wakes, 1);
	kvs_event_set(event);
	errno = error;
}

uint64_t kvs_cuda_wakes(void)
{
	return atomic_load(&wakes);
}

void kvs_cuda_wake_after_fork_in_child(void)
{
	if (event >= 0)
		close(event);
	event = -1;
}
