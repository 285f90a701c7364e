/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What runs when the library is loaded. In a process that is no Python one it looks up one symbol; in a Python one it
 * adds one audit hook. It says nothing, opens nothing and starts nothing: that waits until a connector is imported.
 */
#define _GNU_SOURCE
#include "preload.h"

#include <errno.h>
#include <pthread.h>

#include "../transport/agent.h"
#include "options.h"
#include "python/api.h"
#include "python/hook.h"

static void watch_forks(void)
{
	pthread_atfork(kvs_agent_before_fork, kvs_agent_after_fork_in_parent, kvs_agent_after_fork_in_child);
}

void kvs_preload_watch_forks(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, watch_forks);
}

__attribute__((constructor)) static void preload(void)
{
	int saved = errno;
	if (!kvs_options_disabled() && kvs_py_present() && kvs_py_load())
		kvs_hook_install();
	errno = saved;
}
