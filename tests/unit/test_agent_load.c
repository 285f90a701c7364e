/* SPDX-License-Identifier: Apache-2.0 */
/* Many rooms, several processes, forks, idleness, metrics. */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/agent_fleet.h"
#include "transport/state.h"

#if defined(__SANITIZE_THREAD__)
#define THREADS_AFTER_FORK 0 /* not supported by the thread sanitizer */
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREADS_AFTER_FORK 0
#endif
#endif
#ifndef THREADS_AFTER_FORK
#define THREADS_AFTER_FORK 1
#endif

/* One prefill process of its own, with all rooms at once. */
static void prefill_process(struct fleet *fleet, const uint64_t *generations, uint32_t only_rank)
{
	enum { MOST = 128 };
	static struct fleet_job jobs[MOST];
	uint32_t begun = 0, failed = 0, count, first = fleet_first_target(fleet, only_rank, &count);
	fleet_join(fleet);
	for (uint32_t room = 0; room < fleet->shape.rooms; room++) {
		for (uint32_t d = first; d < first + count && begun < MOST; d++) {
			struct kvs_pull pull =
			        fleet_pull(fleet, only_rank, d, room, generations[room * fleet->shape.decode_tp + d]);
			fleet_begin(&jobs[begun++], &pull);
		}
	}
	for (uint32_t i = 0; i < begun; i++)
		failed += !fleet_end(&jobs[i]);
	for (uint32_t r = 0; r < fleet->shape.prefill_tp; r++)
		kvs_endpoint_remove(fleet->endpoints[r]);
	_exit(failed == 0 ? 0 : 1);
}

static void many_rooms(uint32_t prefill_tp, uint32_t decode_tp, const char *transports)
{
	struct fleet_shape shape = {prefill_tp, decode_tp, 8, 2, 16, 6, 64, 128, 64};
	uint64_t generations[64 * FLEET_RANKS];
	pid_t processes[FLEET_RANKS];
	fleet_prefill_config.transports = fleet_decode_config.transports = transports;
	struct fleet *fleet = fleet_start_decode(&shape);
	fleet_fill(fleet);
	for (uint32_t room = 0; room < shape.rooms; room++) {
		for (uint32_t d = 0; d < decode_tp; d++)
			generations[room * decode_tp + d] = fleet_open(fleet, d, room);
	}
	for (uint32_t r = 0; r < prefill_tp; r++) {
		processes[r] = fork();
		if (processes[r] == 0)
			prefill_process(fleet, generations, r);
	}
	for (uint32_t r = 0; r < prefill_tp; r++) {
		int status;
		waitpid(processes[r], &status, 0);
		cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "prefill %u: 0x%x", r, (unsigned)status);
	}
	for (uint32_t room = 0; room < shape.rooms; room++) {
		cr_expect(fleet_wrong(fleet, room) == 0, "room %u", room);
		for (uint32_t d = 0; d < decode_tp; d++)
			fleet_close(fleet, d, room, KVS_ROOM_SUCCESS);
	}
	cr_expect(fleet_strayed(fleet) == 0);
	cr_expect(fleet_log_count(" done: route=") == shape.rooms * decode_tp);
	fleet_join(fleet); /* for fleet_stop */
	fleet_stop(fleet);
}

Test(agent_load, rooms_64_of_4_by_2, .timeout = 120)
{
	many_rooms(4, 2, "host,tcp");
}

Test(agent_load, rooms_64_of_2_by_4_tcp, .timeout = 120)
{
	many_rooms(2, 4, "tcp");
}

static uint32_t open_descriptors(void)
{
	uint32_t count = 0;
	DIR *folder = opendir("/proc/self/fd");
	while (readdir(folder) != NULL)
		count++;
	closedir(folder);
	return count;
}

/* In the child: nothing of the parent's is known or open, and the agent can be started anew. */
static int forked_child(const struct fleet *fleet, uint32_t descriptors)
{
	struct kvs_text text;
	uint8_t record[KVS_RECORD_MAX];
	if (open_descriptors() != descriptors)
		return 1;
	if (kvs_endpoint_record(fleet->endpoints[0], record) != 0 ||
	    kvs_room_state(fleet->endpoints[0], 1, &text) != KVS_ROOM_UNKNOWN)
		return 2;
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, 0);
	if (kvs_pull(&pull, &text))
		return 3;
	kvs_endpoint_remove(fleet->endpoints[0]);
	if (THREADS_AFTER_FORK) {
		uint64_t endpoint = kvs_endpoint_add(KVS_ROLE_DECODE, fleet->decode[0], "127.0.0.1", &text);
		if (endpoint == 0 || kvs_endpoint_record(endpoint, record) == 0)
			return 4;
		if (memcmp(record, fleet->records[0], sizeof(struct kvs_record)) == 0)
			return 5;
		kvs_endpoint_remove(endpoint);
		if (open_descriptors() != descriptors)
			return 6;
	}
	return 0;
}

Test(agent_load, forks_under_load, .timeout = 120)
{
#ifdef __SANITIZE_ADDRESS__
	cr_skip("the allocator of gcc 12's ASan may be locked at a fork, for ever in the child");
#endif
	struct fleet_shape shape = {2, 1, 8, 2, 64, 16, 1, 128, 128};
	uint32_t descriptors = open_descriptors() + 1; /* the fleet's control socket */
	struct fleet *fleet = fleet_start(&shape);
	pthread_t threads[4];
	void *moved;
	pthread_atfork(kvs_agent_before_fork, kvs_agent_after_fork_in_parent, kvs_agent_after_fork_in_child);
	fleet_fill(fleet);
	fleet_open(fleet, 0, 0);
	for (int i = 0; i < 4; i++)
		cr_assert(pthread_create(&threads[i], NULL, fleet_load, fleet) == 0);
	for (int i = 0; i < 200; i++) {
		int status;
		pid_t child = fork();
		if (child == 0)
			_exit(forked_child(fleet, descriptors));
		cr_assert(waitpid(child, &status, 0) == child);
		cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "fork %d: 0x%x", i, (unsigned)status);
	}
	atomic_store(&fleet_load_ends, true);
	for (int i = 0; i < 4; i++) {
		pthread_join(threads[i], &moved);
		cr_expect((uintptr_t)moved > 0);
	}
	fleet_stop(fleet);
}

Test(agent_load, idle_costs_nothing, .timeout = 60)
{
	struct fleet_shape shape = {2, 2, 8, 2, 16, 4, 2, 128, 128};
	struct rusage before, after;
	fleet_prefill_config.splice_equal_tp = fleet_decode_config.splice_equal_tp = true;
	struct fleet *fleet = fleet_start(&shape);
	fleet_fill(fleet);
	cr_assert(fleet_transfer(fleet, 0));
	cr_expect(fleet_wrong(fleet, 0) == 0, "equal TP, asked to be spliced");
	uint64_t decode = fleet_decode_cpu_us(fleet);
	getrusage(RUSAGE_SELF, &before);
	sleep(2);
	getrusage(RUSAGE_SELF, &after);
	uint64_t prefill = (uint64_t)(after.ru_utime.tv_sec - before.ru_utime.tv_sec) * 1000000 +
	                   (uint64_t)(after.ru_utime.tv_usec - before.ru_utime.tv_usec);
	decode = fleet_decode_cpu_us(fleet) - decode;
	cr_expect(prefill < 20000 && decode < 20000, "%llu and %llu us in 2 s", (unsigned long long)prefill,
	          (unsigned long long)decode);
	fleet_stop(fleet);
}

Test(agent_load, descriptors_and_memory_are_given_back, .timeout = 60)
{
	struct fleet_shape shape = {2, 1, 8, 2, 16, 4, 2, 128, 128};
	uint32_t before = open_descriptors();
	for (int i = 0; i < 3; i++) {
		struct fleet *fleet = fleet_start(&shape);
		fleet_fill(fleet);
		cr_expect(fleet_transfer(fleet, 0));
		fleet_stop(fleet);
		cr_expect(open_descriptors() == before, "%u and %u", open_descriptors(), before);
	}
}

Test(agent_load, metrics, .timeout = 60)
{
	struct fleet_shape shape = {2, 1, 8, 2, 16, 4, 2, 128, 128};
	char folder[] = "/tmp/kvsplice-test-XXXXXX", path[128], name[192], text[16384];
	cr_assert(mkdtemp(folder) != NULL);
	(void)snprintf(path, sizeof(path), "%s/metrics", folder);
	fleet_decode_config.stats_path = fleet_prefill_config.stats_path = path;
	struct fleet *fleet = fleet_start(&shape);
	pid_t decode = fleet->child;
	fleet_fill(fleet);
	cr_expect(fleet_transfer(fleet, 0));
	fleet_stop(fleet);
	pid_t pids[2] = {decode, getpid()};
	static const char *const lines[2] = {"kvsplice_rooms_done_total 1\n", "kvsplice_pulls_asked_total 2\n"};
	for (int i = 0; i < 2; i++) {
		(void)snprintf(name, sizeof(name), "%s.%d", path, (int)pids[i]);
		FILE *file = fopen(name, "r");
		cr_assert(file != NULL, "%s", name);
		text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
		fclose(file);
		cr_expect(strstr(text, lines[i]) != NULL, "%s", text);
		cr_expect(strstr(text, i == 0 ? "kvsplice_received_bytes_total{route=\"host\"} 262144\n"
		                              : "kvsplice_sent_bytes_total{route=\"host\"} 262144\n") != NULL,
		          "%s", text);
		unlink(name);
	}
	cr_expect(rmdir(folder) == 0, "nothing else is left there");
}
