/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp between two network namespaces, for tests/net/run: the test runs in one, the decode's process enters the other.
 * KVS_TEST_DECODE_NETNS is the path of that one, KVS_TEST_DECODE_ADDRESS where the decode listens, KVS_TEST_CUT a
 * command that cuts the cable, KVS_TEST_MEND one that mends it. Without them the cases are skipped.
 */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "support/agent_fleet.h"

static const struct fleet_shape shapes[] = {
        {2, 1, 8, 3, 16, 7, 2, 128, 128},
        {1, 2, 8, 3, 16, 7, 2, 128, 128},
        {8, 2, 4, 2, 16, 5, 2, 192, 128},
        {1, 4, 8, 1, 64, 70, 1, 256, 0},
};
/* 126 MB a room: long enough to be cut. */
static const struct fleet_shape large = {1, 2, 8, 4, 64, 120, 3, 256, 256};

static void enter_decode_namespace(void)
{
	int fd = open(getenv("KVS_TEST_DECODE_NETNS"), O_RDONLY | O_CLOEXEC);
	if (fd < 0 || setns(fd, CLONE_NEWNET) != 0)
		_exit(9);
	close(fd);
}

static void prepare(void)
{
	if (getenv("KVS_TEST_DECODE_NETNS") == NULL)
		cr_skip("KVS_TEST_DECODE_NETNS is not set");
	fleet_child_setup = enter_decode_namespace;
	fleet_decode_config.listen = getenv("KVS_TEST_DECODE_ADDRESS");
}

TestSuite(net, .init = prepare, .timeout = 120);

static void run(const char *variable)
{
	cr_assert(system(getenv(variable)) == 0, "%s", variable); // NOLINT: a test's own command
}

static uint64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void wait_ms(unsigned ms)
{
	struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
	nanosleep(&time, NULL);
}

Test(net, shapes)
{
	for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
		struct fleet *fleet = fleet_start(&shapes[i]);
		fleet_fill(fleet);
		for (uint32_t room = 0; room < shapes[i].rooms; room++) {
			cr_expect(fleet_transfer(fleet, room), "shape %zu room %u", i, room);
			cr_expect(fleet_wrong(fleet, room) == 0, "shape %zu room %u", i, room);
		}
		cr_expect(fleet_strayed(fleet) == 0);
		cr_expect(fleet_log_count("done: route=tcp") == shapes[i].rooms * shapes[i].decode_tp);
		cr_expect(fleet_log_count("host: no unix socket to pass a descriptor over") > 0);
		fleet_log_clear();
		fleet_stop(fleet);
	}
}

/* Cut for less than the timeout: the room is late and right. */
Test(net, cable_cut_and_mended)
{
	struct fleet *fleet = fleet_start(&large);
	struct fleet_job job;
	fleet_fill(fleet);
	uint64_t generation = fleet_open(fleet, 0, 0);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
	run("KVS_TEST_CUT");
	fleet_begin(&job, &pull);
	wait_ms(1500);
	cr_expect(!job.done);
	run("KVS_TEST_MEND");
	cr_expect(fleet_end(&job), "%s", job.text.s);
	fleet_close(fleet, 0, 0, KVS_ROOM_SUCCESS);
	cr_expect(fleet_transfer(fleet, 1));
	cr_expect(fleet_wrong(fleet, 1) == 0);
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}

/* Cut for good: both sides fail the room in time, and rooms go again once the cable is mended. */
Test(net, cable_cut)
{
	fleet_prefill_config.timeout_ms = fleet_decode_config.timeout_ms = 2000;
	struct fleet *fleet = fleet_start(&large);
	struct fleet_job job;
	fleet_fill(fleet);
	cr_assert(fleet_transfer(fleet, 0));
	uint64_t generation = fleet_open(fleet, 0, 1), began = now_ms();
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 1, generation);
	run("KVS_TEST_CUT");
	fleet_begin(&job, &pull);
	bool ok = fleet_end(&job);
	uint64_t took = now_ms() - began;
	run("KVS_TEST_MEND");
	cr_expect(!ok);
	cr_expect(took < 5000, "%llu ms", (unsigned long long)took);
	fleet_close(fleet, 0, 1, KVS_ROOM_FAILURE);
	uint64_t touched = fleet_touched(fleet, 1);
	wait_ms(500);
	cr_expect(fleet_touched(fleet, 1) == touched, "bytes landed after the close");
	bool again = false;
	for (int i = 0; i < 5 && !again; i++) {
		again = fleet_transfer(fleet, 2);
		wait_ms(500);
	}
	cr_expect(again, "no room goes over the mended cable");
	cr_expect(fleet_wrong(fleet, 2) == 0);
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}
