/* SPDX-License-Identifier: Apache-2.0 */
/* Forks: many from a process with sixteen busy threads and a busy agent; options that a child is given. */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shim/log.h"
#include "shim/options.h"
#include "shim/preload.h"
#include "support/agent_fleet.h"

#ifdef __SANITIZE_THREAD__
#define FORKS 250 /* each costs ten times as much */
#else
#define FORKS 1000
#endif
#define THREADS 16
#define PULLERS 4
/* A child that hangs is ended by this signal, after so many seconds. */
#define PATIENCE 20

/* Everything else that takes a lock, of ours and of the C library. */
static void *work_all_the_time(void *argument)
{
	struct fleet *fleet = argument;
	uintptr_t rounds = 0;
	for (; !atomic_load(&fleet_load_ends); rounds++) {
		struct kvs_text text;
		uint8_t record[KVS_RECORD_MAX];
		uint64_t peer = kvs_peer_add(fleet->records[0], fleet->record_sizes[0], &text);
		kvs_endpoint_record(fleet->endpoints[0], record);
		kvs_source_fail(fleet->endpoints[0], 0, 1000 + rounds % 7, 0, "a reason");
		kvs_source_forget(fleet->endpoints[0], 1000 + rounds % 7);
		kvs_peer_remove(peer);
		free(malloc(100 + rounds % 5000));
		usleep(200);
	}
	return (void *)rounds;
}

/* What a child may do before it becomes another program, or instead of that. */
static int child_main(const struct fleet *fleet)
{
	struct kvs_text text;
	uint8_t record[KVS_RECORD_MAX];
	alarm(PATIENCE);
	if (kvs_endpoint_record(fleet->endpoints[0], record) != 0)
		return 1;
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, 0);
	if (kvs_pull(&pull, &text))
		return 2;
	kvs_source_cancel(fleet->endpoints[0], 0);
	kvs_endpoint_remove(fleet->endpoints[0]);
	free(malloc(1000));
	return 0;
}

Test(hook_forks, of_a_busy_process, .timeout = 240)
{
#ifdef __SANITIZE_ADDRESS__
	cr_skip("the allocator of gcc 12's ASan may be locked at a fork, for ever in the child");
#endif
	struct fleet_shape shape = {2, 1, 8, 2, 64, 16, 1, 128, 128};
	struct fleet *fleet = fleet_start(&shape);
	pthread_t threads[THREADS];
	void *done;
	kvs_preload_watch_forks();
	kvs_preload_watch_forks();
	fleet_fill(fleet);
	fleet_open(fleet, 0, 0);
	for (int i = 0; i < THREADS; i++)
		cr_assert(pthread_create(&threads[i], NULL, i < PULLERS ? fleet_load : work_all_the_time, fleet) == 0);
	for (int i = 0; i < FORKS; i++) {
		int status;
		pid_t child = fork();
		if (child == 0)
			_exit(child_main(fleet));
		cr_assert(child > 0, "%s", strerror(errno));
		cr_assert(waitpid(child, &status, 0) == child);
		cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "fork %d: 0x%x", i, (unsigned)status);
	}
	atomic_store(&fleet_load_ends, true);
	for (int i = 0; i < THREADS; i++) {
		pthread_join(threads[i], &done);
		cr_expect((uintptr_t)done > 0, "thread %d did nothing", i);
	}
	fleet_stop(fleet);
}

/* Run in a forked child; its exit status. */
static int status_of(int (*function)(void))
{
	int status = 0;
	pid_t child = fork();
	if (child == 0)
		_exit(function());
	cr_assert(waitpid(child, &status, 0) == child);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int changed_child(void)
{
	setenv("KVSPLICE_STAGING_MB", "9", 1);
	unsetenv("KVSPLICE_POLICY");
	if (kvs_options()->staging_mb != 7)
		return 1;
	kvs_options_renew();
	if (kvs_options()->staging_mb != 9 || kvs_options()->policy != KVS_POLICY_AUTO)
		return 2;
	setenv("KVSPLICE_STAGING_MB", "11", 1);
	kvs_options_renew();
	return kvs_options()->staging_mb == 9 ? 0 : 3;
}

static int grandparent(void)
{
	return status_of(changed_child);
}

Test(hook_forks, a_child_has_options_of_its_own)
{
	setenv("KVSPLICE_STAGING_MB", "7", 1);
	setenv("KVSPLICE_POLICY", "all", 1);
	cr_assert_eq(kvs_options()->staging_mb, 7);
	cr_assert_eq(status_of(changed_child), 0);
	cr_assert_eq(status_of(grandparent), 0);
	setenv("KVSPLICE_STAGING_MB", "8", 1);
	kvs_options_renew();
	cr_assert_eq(kvs_options()->staging_mb, 7, "a process reads its own once");
	cr_assert_eq(kvs_options()->policy, KVS_POLICY_ALL);
}

/* Lines of the child on standard error, which is a pipe here. */
static int line_count(int from)
{
	char text[8192];
	ssize_t size = read(from, text, sizeof text - 1);
	int count = 0;
	for (ssize_t i = 0; i < size; i++)
		count += text[i] == '\n';
	return count;
}

static int telling_child(void)
{
	setenv("KVSPLICE_STAGING_MB", "0", 1);
	kvs_options_renew();
	kvs_options_report();
	return 0;
}

static int quiet_child(void)
{
	kvs_options_renew();
	return 0;
}

Test(hook_forks, a_child_warns_of_values_that_are_new)
{
	int ends[2], own = dup(2);
	cr_assert_eq(pipe(ends), 0);
	setenv("KVSPLICE_TIMEOUT_MS", "1", 1);
	kvs_log_install();
	dup2(ends[1], 2);
	kvs_options_report();
	cr_expect_eq(line_count(ends[0]), 1);
	cr_expect_eq(status_of(quiet_child), 0);
	cr_expect_eq(status_of(telling_child), 0);
	dup2(own, 2);
	cr_expect_eq(line_count(ends[0]), 2, "the old one and the new one, of the second child alone");
}
