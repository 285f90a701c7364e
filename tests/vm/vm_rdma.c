/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rdma transport over devices that tests/vm/suite has set up, under loss, delay, cut links and limits. What is
 * there is told by variables; without them a case is skipped.
 *
 * KVS_TEST_PREFILL_DEVICE, KVS_TEST_DECODE_DEVICE   the devices, a cable between them
 * KVS_TEST_MTU                                      bytes that the path must have got
 * KVS_TEST_MEMLOCK                                  RLIMIT_MEMLOCK of this process, too little
 * KVS_TEST_SOAK_S                                   seconds to go on for, while links are cut and mended
 * KVS_TEST_SOAK_BACK                                at the end rooms must go over rdma again
 * KVS_TEST_SPEED                                    print bytes per second
 * KVS_TEST_TCP                                      tcp alone, over whatever the loopback interface does
 */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "support/agent_fleet.h"

static const struct fleet_shape shapes[] = {
        {2, 1, 8, 3, 16, 7, 2, 128, 128},
        {1, 2, 8, 3, 16, 7, 2, 128, 128},
        {4, 2, 8, 2, 1, 33, 2, 64, 32},
        {1, 4, 8, 1, 64, 20, 1, 256, 0},
};

static const char *variable(const char *name)
{
	const char *value = getenv(name);
	if (value == NULL)
		cr_skip("%s is not set", name);
	return value;
}

static uint64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void use_cable(void)
{
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma";
	fleet_prefill_config.rdma_device = variable("KVS_TEST_PREFILL_DEVICE");
	fleet_decode_config.rdma_device = variable("KVS_TEST_DECODE_DEVICE");
}

/* Kilobytes that devices hold in a process's memory. */
static long pinned(pid_t process)
{
	char path[64], line[128];
	long kilobytes = -1;
	(void)snprintf(path, sizeof(path), "/proc/%d/status", (int)process);
	FILE *file = fopen(path, "re");
	cr_assert(file != NULL);
	while (fgets(line, sizeof(line), file) != NULL) {
		if (sscanf(line, "VmPin: %ld", &kilobytes) == 1)
			break;
	}
	fclose(file);
	return kilobytes;
}

static void expect_shapes(const char *route)
{
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		struct fleet *fleet = fleet_start(&shapes[i]);
		fleet_fill(fleet);
		for (uint32_t room = 0; room < shapes[i].rooms; room++) {
			cr_expect(fleet_transfer(fleet, room), "shape %zu room %u", i, room);
			cr_expect(fleet_wrong(fleet, room) == 0, "shape %zu room %u", i, room);
		}
		cr_expect(fleet_strayed(fleet) == 0);
		if (strstr(route, "rdma") != NULL)
			cr_expect(pinned(fleet->child) > 0 && pinned(getpid()) > 0);
		cr_expect(fleet_log_count(route) == shapes[i].rooms * shapes[i].decode_tp, "shape %zu: %u lines", i,
		          fleet_log_count(route));
		fleet_stop(fleet);
		if (i + 1 < sizeof(shapes) / sizeof(shapes[0]))
			fleet_log_clear();
	}
}

Test(vm_rdma, cable, .timeout = 300)
{
	char mtu[32];
	use_cable();
	expect_shapes("done: route=rdma");
	(void)snprintf(mtu, sizeof(mtu), "MTU %s,", variable("KVS_TEST_MTU"));
	cr_expect(fleet_log_count(mtu) > 0, "no pair has %s", mtu);
}

Test(vm_rdma, tcp, .timeout = 300)
{
	(void)variable("KVS_TEST_TCP");
	fleet_prefill_config.transports = fleet_decode_config.transports = "tcp";
	expect_shapes("done: route=tcp");
}

Test(vm_rdma, memlock, .timeout = 120)
{
	static const struct fleet_shape shape = {2, 1, 8, 3, 16, 200, 2, 128, 128};
	char limit[64];
	(void)snprintf(limit, sizeof(limit), "RLIMIT_MEMLOCK is %s bytes", variable("KVS_TEST_MEMLOCK"));
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma,tcp";
	struct fleet *fleet = fleet_start(&shape);
	fleet_fill(fleet);
	cr_expect(fleet_transfer(fleet, 0));
	cr_expect(fleet_wrong(fleet, 0) == 0);
	cr_expect(fleet_log_count(limit) > 0, "nothing says: %s", limit);
	cr_expect(fleet_log_count("done: route=tcp") == 1);
	/* What was registered before the limit is given back, and the processes go on. */
	cr_expect(pinned(fleet->child) == 0, "the decode has %ld kB pinned", pinned(fleet->child));
	cr_expect(pinned(getpid()) == 0, "the prefill has %ld kB pinned", pinned(getpid()));
	cr_expect(fleet_transfer(fleet, 1));
	cr_expect(fleet_wrong(fleet, 1) == 0);
	fleet_stop(fleet);
}

/* Bytes per second of one pull, the best of five: what the suite compares with ib_read_bw. */
static void speed(const struct fleet_shape *shape, const char *name)
{
	struct fleet *fleet = fleet_start(shape);
	double best = 0;
	fleet_fill(fleet);
	for (uint32_t i = 0; i < 5; i++) {
		struct fleet_job job;
		uint64_t generation = fleet_open(fleet, 0, 0);
		struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
		fleet_begin(&job, &pull);
		cr_assert(fleet_end(&job), "%s", job.text.s);
		double bytes =
		        2.0 * shape->layers * shape->pages * shape->page_size * shape->k_width *
		        (shape->heads / (shape->prefill_tp > shape->decode_tp ? shape->prefill_tp : shape->decode_tp));
		double rate = bytes / ((double)(job.ended_ns - job.began_ns) / 1e9) / 1e6;
		best = rate > best && i > 0 ? rate : best;
		fleet_close(fleet, 0, 0, KVS_ROOM_SUCCESS);
	}
	printf("speed: %s %.0f MB/s\n", name, best);
	fflush(stdout); /* the next fleet is forked */
	fleet_stop(fleet);
}

Test(vm_rdma, speed, .timeout = 200)
{
	(void)variable("KVS_TEST_SPEED");
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma";
	/* The shape of gpt-oss-120b: 8 heads of 64 values of 2 bytes, pages of 64 tokens; 4 to 2 and 2 to 4. */
	speed(&(struct fleet_shape){4, 2, 8, 8, 64, 32, 1, 128, 128}, "4 to 2, direct");
	speed(&(struct fleet_shape){2, 4, 8, 8, 64, 32, 1, 128, 128}, "2 to 4, packed");
}

/* Whatever happens to the cable, every room is right, over tcp if need be. */
Test(vm_rdma, soak, .timeout = 300)
{
	static const struct fleet_shape shape = {2, 1, 8, 3, 16, 40, 2, 128, 128};
	long seconds = strtol(variable("KVS_TEST_SOAK_S"), NULL, 10);
	time_t end = time(NULL) + seconds;
	uint32_t done = 0, over_rdma = 0, failed = 0;
	uint64_t longest = 0;
	use_cable();
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma,tcp";
	struct fleet *fleet = fleet_start(&shape);
	fleet_fill(fleet);
	while (time(NULL) < end) {
		uint64_t began = now_ms();
		bool ok = fleet_transfer(fleet, done % 2);
		longest = now_ms() - began > longest ? now_ms() - began : longest;
		cr_assert(!ok || fleet_wrong(fleet, done % 2) == 0);
		failed += ok ? 0 : 1;
		done++;
		over_rdma = fleet_log_count("done: route=rdma components=1");
	}
	fleet_log_clear();
	cr_expect(fleet_transfer(fleet, 0));
	cr_expect(getenv("KVS_TEST_SOAK_BACK") == NULL || fleet_log_count("done: route=rdma components=1") == 1,
	          "rdma was not taken up again");
	printf("soak: %u rooms, %u over rdma alone, %u failed, the longest took %llu ms\n", done, over_rdma, failed,
	       (unsigned long long)longest);
	cr_expect(failed == 0, "%u of %u rooms failed, with tcp to go on with", failed, done);
	fleet_stop(fleet);
}
