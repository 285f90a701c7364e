/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rdma transport between two processes, byte by byte. Over a double of libibverbs, or with KVS_TEST_VERBS=real over
 * the machine's own devices (tests/vm): what only the double can do is skipped there.
 */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "doubles/verbs/double.h"
#include "support/agent_fleet.h"

static struct verbs_double *verbs;

static void load(void)
{
	const char *choice = getenv("KVS_TEST_VERBS");
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma";
	if (choice != NULL && strcmp(choice, "real") == 0)
		return;
	/* The product's dlopen by name finds the library that is loaded already. */
	void *library = dlopen(KVS_VERBS_DOUBLE, RTLD_NOW | RTLD_GLOBAL);
	cr_assert(library != NULL, "%s", dlerror());
	verbs = dlsym(library, "kvs_verbs_double");
	cr_assert(verbs != NULL);
}

TestSuite(rdma_transfer, .init = load, .timeout = 300);
#define DOUBLE_ONLY() \
	if (verbs == NULL) \
	cr_skip("only the double can do this")

static const struct fleet_shape shapes[] = {
        {2, 1, 8, 3, 16, 7, 2, 128, 128}, /* P > D: direct */
        {1, 2, 8, 3, 16, 7, 2, 128, 128}, /* P < D: packed */
        {4, 2, 8, 2, 1, 33, 2, 64, 32},   /* one token to a page, unequal K and V */
        {2, 8, 4, 2, 16, 5, 2, 192, 128}, /* replicated at the decode */
        {8, 2, 4, 2, 16, 5, 2, 192, 128}, /* replicated at the prefill: skips */
        {1, 4, 8, 1, 64, 70, 1, 256, 0},  /* more than the slots hold, no V */
        {8, 1, 8, 2, 64, 6, 1, 128, 128}, {1, 8, 8, 2, 64, 6, 1, 128, 128},
        {3, 1, 6, 2, 32, 9, 1, 64, 64},   {16, 4, 16, 1, 16, 4, 1, 128, 128},
};
#define SHAPES (sizeof(shapes) / sizeof(shapes[0]))

static const struct fleet_shape down = {2, 1, 8, 3, 16, 40, 4, 128, 128};
static const struct fleet_shape up = {1, 2, 8, 3, 16, 40, 4, 128, 128};

static void wait_ms(unsigned ms)
{
	struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
	nanosleep(&time, NULL);
}

static uint64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Nothing is left of what was registered and made. */
static void expect_clean(void)
{
	if (verbs == NULL)
		return;
	cr_expect(verbs->shared->registered == 0, "%d regions are left", verbs->shared->registered);
	cr_expect(verbs->shared->queue_pairs == 0, "%d queue pairs are left", verbs->shared->queue_pairs);
	cr_expect(verbs->shared->write_rights == 0);
	cr_expect(verbs->shared->over == 0);
}

/* All rooms of a shape, byte by byte; route: how the rooms must have gone. */
static void expect_transfers(const struct fleet_shape *shape, const char *route)
{
	struct fleet *fleet = fleet_start(shape);
	fleet_fill(fleet);
	for (uint32_t room = 0; room < shape->rooms; room++) {
		cr_expect(fleet_transfer(fleet, room), "%u to %u room %u", shape->prefill_tp, shape->decode_tp, room);
		cr_expect(fleet_wrong(fleet, room) == 0, "%u to %u room %u: %llu bytes wrong", shape->prefill_tp,
		          shape->decode_tp, room, (unsigned long long)fleet_wrong(fleet, room));
	}
	cr_expect(fleet_strayed(fleet) == 0);
	cr_expect(fleet_log_count(route) == shape->rooms * shape->decode_tp, "%s: %u lines", route,
	          fleet_log_count(route));
	fleet_stop(fleet);
	fleet_log_clear();
	expect_clean();
}

Test(rdma_transfer, shapes)
{
	for (size_t i = 0; i < SHAPES; i++)
		expect_transfers(&shapes[i], "done: route=rdma components=1 bytes=");
}

Test(rdma_transfer, one_pair_for_all_rooms)
{
	DOUBLE_ONLY();
	expect_transfers(&down, "done: route=rdma");
	/* Two prefill ranks, one decode rank: a pair each way, whatever the number of rooms; each region once a
	 * process. */
	cr_expect(verbs->shared->queue_pairs_made == 4, "%d", verbs->shared->queue_pairs_made);
	cr_expect(verbs->shared->registrations == 3 * 6, "%d", verbs->shared->registrations);
	cr_expect(verbs->shared->read_rights == 2 * 6, "%d", verbs->shared->read_rights);
	cr_expect(verbs->shared->signaled * 4 < verbs->shared->reads, "%d of %d", verbs->shared->signaled,
	          verbs->shared->reads);
}

Test(rdma_transfer, few_requests)
{
	DOUBLE_ONLY();
	/* P > D: a page of 16 tokens x 512 bytes is one READ with 16 places. */
	expect_transfers(&down, "done: route=rdma");
	int direct = verbs->shared->reads;
	cr_expect(direct <= 4 * 2 * 6 * 40, "%d", direct);
	/* P < D: packed, so that runs of 512 bytes become READs of whole slots. */
	expect_transfers(&up, "done: route=rdma");
	cr_expect((verbs->shared->reads - direct) * 100 < 4 * 2 * 6 * 40 * 16, "%d", verbs->shared->reads - direct);
}

Test(rdma_transfer, short_list)
{
	DOUBLE_ONLY();
	verbs->device.max_sge_rd = 1;
	expect_transfers(&down, "done: route=rdma");
	expect_transfers(&up, "done: route=rdma");
	cr_expect(verbs->shared->longest_list == 1);
	verbs->device.max_sge_rd = 4;
	expect_transfers(&down, "done: route=rdma");
	cr_expect(verbs->shared->longest_list == 4);
}

Test(rdma_transfer, read_limit_not_stated)
{
	DOUBLE_ONLY();
	verbs->device.max_sge_rd = 0;
	verbs->device.max_sge = 3;
	expect_transfers(&down, "done: route=rdma");
	cr_expect(verbs->shared->longest_list == 3);
}

Test(rdma_transfer, list_and_depth_not_together)
{
	DOUBLE_ONLY();
	verbs->device.max_sge = 8; /* what create_qp takes; max_sge_rd promises 30 */
	expect_transfers(&down, "done: route=rdma");
	cr_expect(verbs->shared->longest_list <= 8);
}

Test(rdma_transfer, shallow_queue)
{
	DOUBLE_ONLY();
	verbs->device.max_qp_wr = 16;
	verbs->device.max_cqe = 8;
	expect_transfers(&down, "done: route=rdma");
	expect_transfers(&up, "done: route=rdma");
	cr_expect(verbs->shared->deepest <= 8, "%d", verbs->shared->deepest);
}

Test(rdma_transfer, small_regions)
{
	DOUBLE_ONLY();
	/* Items straddle the ends of regions, at both ends. */
	verbs->device.max_mr_size = 12288;
	expect_transfers(&down, "done: route=rdma");
	verbs->device.max_mr_size = 20481;
	expect_transfers(&(struct fleet_shape){2, 1, 8, 2, 64, 7, 2, 128, 72}, "done: route=rdma");
	verbs->device.max_mr_size = 1 << 24; /* the slots fit */
	expect_transfers(&up, "done: route=rdma");
}

static void child_asks_more(void)
{
	verbs->device.max_init_rd_atom = 128;
	verbs->device.mtu = 3;
	verbs->device.gid_last = 2;
}

Test(rdma_transfer, smaller_of_both_ends)
{
	DOUBLE_ONLY();
	verbs->device.max_rd_atom = 5;
	fleet_child_setup = child_asks_more;
	expect_transfers(&down, "done: route=rdma");
	cr_expect(verbs->shared->rd_atom == 5, "%d", verbs->shared->rd_atom);
	cr_expect(verbs->shared->path_mtu == 3);
	/* The device grants one only, and one that says 0 is asked for one. */
	verbs->device.grant_rd_atom = 1;
	expect_transfers(&down, "done: route=rdma");
	cr_expect(verbs->shared->rd_atom == 1);
}

static void child_reads_one(void)
{
	verbs->device.max_init_rd_atom = 1;
}

Test(rdma_transfer, one_read_at_a_time)
{
	DOUBLE_ONLY();
	fleet_child_setup = child_reads_one;
	expect_transfers(&up, "done: route=rdma");
	cr_expect(verbs->shared->rd_atom == 1);
}

Test(rdma_transfer, verified)
{
	DOUBLE_ONLY();
	fleet_prefill_config.verify = fleet_decode_config.verify = true;
	expect_transfers(&down, "done: route=rdma");
	expect_transfers(&up, "done: route=rdma");
	struct fleet *fleet = fleet_start(&down);
	fleet_fill(fleet);
	cr_expect(fleet_transfer(fleet, 0));
	verbs->shared->corrupt_read = verbs->shared->reads + 3;
	cr_expect(!fleet_transfer(fleet, 1));
	cr_expect(fleet_log_count("KVSPLICE_VERIFY: component 0 chunk 0") > 0);
	cr_expect(fleet_transfer(fleet, 2));
	fleet_stop(fleet);
	expect_clean();
	/* The same on the others. */
	fleet_prefill_config.transports = fleet_decode_config.transports = "tcp";
	expect_transfers(&up, "done: route=tcp");
	fleet_prefill_config.transports = fleet_decode_config.transports = "host";
	expect_transfers(&down, "done: route=host");
}

/* ---- not to be had: the next transport, with the reason ---- */

static void expect_fallback(const char *reason)
{
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma,tcp";
	struct fleet *fleet = fleet_start(&down);
	fleet_fill(fleet);
	cr_expect(fleet_transfer(fleet, 0));
	cr_expect(fleet_wrong(fleet, 0) == 0);
	cr_expect(fleet_log_count(reason) > 0, "nothing says: %s", reason);
	cr_expect(fleet_log_count("done: route=tcp") == 1);
	fleet_stop(fleet);
	fleet_log_clear();
	expect_clean();
}

Test(rdma_transfer, iwarp)
{
	DOUBLE_ONLY();
	verbs->device.transport_type = 1;
	expect_fallback("iWARP");
}

Test(rdma_transfer, port_not_active)
{
	DOUBLE_ONLY();
	verbs->device.port_state = 1;
	expect_fallback("double0 port 1: not active");
}

static void child_ipv6(void)
{
	verbs->device.ipv6 = true;
}

Test(rdma_transfer, other_family)
{
	DOUBLE_ONLY();
	/* The link-local address of RoCE v1 would match: it is there and is taken, as nothing better is. */
	fleet_child_setup = child_ipv6;
	expect_transfers(&down, "done: route=rdma");
	fleet_decode_config.rdma_gid = 2;
	expect_fallback("no RDMA address of the same kind at both ends");
}

Test(rdma_transfer, wrong_gid_index)
{
	fleet_decode_config.rdma_gid = fleet_prefill_config.rdma_gid = 100;
	expect_fallback("no GID at the index of KVSPLICE_RDMA_GID_INDEX");
}

Test(rdma_transfer, wrong_device)
{
	fleet_decode_config.rdma_device = fleet_prefill_config.rdma_device = "mlx9_0";
	expect_fallback("no device mlx9_0 (KVSPLICE_RDMA_DEVICE)");
}

static const struct {
	int error;
	const char *text;
} refusals[] = {
        {ENOMEM, "Cannot allocate memory"},
        {EFAULT, "Bad address"},
        {EINVAL, "Invalid argument"},
        {EIO, "Input/output error"},
};

Test(rdma_transfer, registration_refused)
{
	DOUBLE_ONLY();
	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
		verbs->device.fail_reg = 3;
		verbs->device.fail_reg_errno = refusals[i].error;
		expect_fallback("region 3 of 6: cannot register");
		expect_fallback(refusals[i].text);
	}
}

Test(rdma_transfer, queue_pair_refused)
{
	DOUBLE_ONLY();
	verbs->device.fail_qp = 1;
	verbs->device.fail_qp_errno = ENOMEM;
	expect_fallback("ibv_create_qp with 128 requests of 30 pieces: Cannot allocate memory");
}

/* ---- in mid-request ---- */

/* Once the pair is up: the first request waits for it. */
static struct fleet *start_up(const struct fleet_shape *shape)
{
	struct fleet *fleet = fleet_start(shape);
	fleet_fill(fleet);
	cr_assert(fleet_transfer(fleet, 0));
	cr_assert(fleet_wrong(fleet, 0) == 0);
	return fleet;
}

Test(rdma_transfer, error_hands_over_and_the_pair_is_made_again)
{
	DOUBLE_ONLY();
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma,tcp";
	struct fleet *fleet = start_up(&down);
	verbs->shared->fail_status = 10;
	verbs->shared->fail_read = verbs->shared->reads + 7;
	cr_expect(fleet_transfer(fleet, 1));
	cr_expect(fleet_wrong(fleet, 1) == 0);
	cr_expect(fleet_log_count("remote access error (status 10, vendor 0x51)") > 0);
	cr_expect(fleet_log_count("double0: READ of ") > 0);
	wait_ms(200);
	cr_expect(fleet_transfer(fleet, 2));
	cr_expect(fleet_wrong(fleet, 2) == 0);
	cr_expect(fleet_strayed(fleet) == 0);
	cr_expect(fleet_log_count("done: route=rdma components=1") == 2, "%u", fleet_log_count("done: route=rdma"));
	fleet_stop(fleet);
	expect_clean();
}

Test(rdma_transfer, broken_again_and_again)
{
	DOUBLE_ONLY();
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma,tcp";
	struct fleet *fleet = start_up(&(struct fleet_shape){2, 1, 8, 3, 16, 7, 10, 128, 128});
	verbs->shared->fail_status = 12;
	for (uint32_t room = 1; room < 10; room++) {
		verbs->shared->fail_read = verbs->shared->reads + 1;
		cr_expect(fleet_transfer(fleet, room));
		cr_expect(fleet_wrong(fleet, room) == 0);
		wait_ms(100);
	}
	cr_expect(fleet_log_count("rdma cannot be used: broken 4 times in a row") >= 1);
	cr_expect(verbs->shared->queue_pairs_made <= 4 * 5, "%d", verbs->shared->queue_pairs_made);
	fleet_stop(fleet);
	expect_clean();
}

/* A room is closed with READs on their way: none lands in pages that are another room's by then. */
static void close_in_flight(const struct fleet_shape *shape)
{
	struct fleet *fleet = start_up(shape);
	struct fleet_job job;
	verbs->shared->stall = 1;
	uint64_t generation = fleet_open(fleet, 0, 1);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 1, generation);
	fleet_begin(&job, &pull);
	wait_ms(300);
	uint64_t began = now_ms();
	fleet_close(fleet, 0, 1, KVS_ROOM_FAILURE);
	cr_expect(now_ms() - began < 2000, "closing took %llu ms", (unsigned long long)(now_ms() - began));
	uint64_t touched = fleet_touched(fleet, 1);
	verbs->shared->stall = 0;
	cr_expect(!fleet_end(&job));
	wait_ms(200);
	cr_expect(fleet_touched(fleet, 1) == touched, "bytes landed after the close");
	/* And the next room goes over a new pair. */
	cr_expect(fleet_transfer(fleet, 2));
	cr_expect(fleet_wrong(fleet, 2) == 0);
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
	fleet_log_clear();
	expect_clean();
}

Test(rdma_transfer, close_in_flight)
{
	DOUBLE_ONLY();
	close_in_flight(&down);
	close_in_flight(&up);
	/* A device that does not drain. */
	verbs->device.marker_refused = true;
	close_in_flight(&down);
}

Test(rdma_transfer, timeout_in_flight)
{
	DOUBLE_ONLY();
	fleet_prefill_config.timeout_ms = 1500;
	struct fleet *fleet = start_up(&down);
	struct fleet_job job;
	verbs->shared->stall = 1;
	uint64_t generation = fleet_open(fleet, 0, 1), began = now_ms();
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 1, generation);
	fleet_begin(&job, &pull);
	cr_expect(!fleet_end(&job));
	cr_expect(now_ms() - began < 4000);
	cr_expect(strstr(job.text.s, "KVSPLICE_TIMEOUT_MS") != NULL, "%s", job.text.s);
	fleet_close(fleet, 0, 1, KVS_ROOM_FAILURE);
	uint64_t touched = fleet_touched(fleet, 1);
	verbs->shared->stall = 0;
	wait_ms(200);
	cr_expect(fleet_touched(fleet, 1) == touched);
	cr_expect(fleet_transfer(fleet, 2));
	cr_expect(fleet_wrong(fleet, 2) == 0);
	fleet_stop(fleet);
	expect_clean();
}

Test(rdma_transfer, stall_hands_over)
{
	DOUBLE_ONLY();
	/* A device that never ends a READ: the next transport carries the request while there is time. */
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma,tcp";
	fleet_prefill_config.timeout_ms = fleet_decode_config.timeout_ms = 4000;
	struct fleet *fleet = start_up(&down);
	verbs->shared->stall = 1;
	cr_expect(fleet_transfer(fleet, 1));
	cr_expect(fleet_wrong(fleet, 1) == 0);
	cr_expect(fleet_log_count("has ended for 1") > 0);
	verbs->shared->stall = 0;
	wait_ms(200);
	cr_expect(fleet_transfer(fleet, 2));
	cr_expect(fleet_wrong(fleet, 2) == 0);
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
	expect_clean();
}

Test(rdma_transfer, cancel_in_flight)
{
	DOUBLE_ONLY();
	struct fleet *fleet = start_up(&up);
	struct fleet_job job;
	verbs->shared->stall = 1;
	uint64_t generation = fleet_open(fleet, 0, 1);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 1, generation);
	fleet_begin(&job, &pull);
	wait_ms(200);
	kvs_source_cancel(fleet->endpoints[0], pull.room);
	cr_expect(!fleet_end(&job));
	kvs_source_forget(fleet->endpoints[0], pull.room);
	fleet_close(fleet, 0, 1, KVS_ROOM_FAILURE);
	verbs->shared->stall = 0;
	cr_expect(fleet_transfer(fleet, 2));
	cr_expect(fleet_wrong(fleet, 2) == 0);
	fleet_stop(fleet);
	expect_clean();
}

Test(rdma_transfer, device_removed)
{
	DOUBLE_ONLY();
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma,tcp";
	struct fleet *fleet = start_up(&down);
	struct fleet_job job;
	verbs->shared->stall = 1;
	verbs->shared->fatal = 1;
	uint64_t generation = fleet_open(fleet, 0, 1);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 1, generation);
	fleet_begin(&job, &pull);
	cr_expect(fleet_end(&job), "%s", job.text.s);
	cr_expect(fleet_log_count("device double0 has reported a fatal error") > 0);
	cr_expect(fleet_log_count("rdma cannot be used") > 0);
	verbs->shared->stall = 0;
	fleet_close(fleet, 0, 1, KVS_ROOM_SUCCESS);
	cr_expect(fleet_transfer(fleet, 2));
	cr_expect(fleet_wrong(fleet, 2) == 0);
	fleet_stop(fleet);
	expect_clean();
}

Test(rdma_transfer, decode_killed)
{
	struct fleet *fleet = start_up(&down);
	struct fleet_job job;
	if (verbs != NULL)
		verbs->shared->stall = 1;
	uint64_t generation = fleet_open(fleet, 0, 1);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 1, generation);
	cr_assert(kill(fleet->child, verbs == NULL ? SIGSTOP : 0) == 0);
	fleet_begin(&job, &pull);
	wait_ms(100);
	uint64_t began = now_ms();
	cr_assert(kill(fleet->child, SIGKILL) == 0);
	cr_expect(!fleet_end(&job));
	cr_expect(now_ms() - began < 2000);
	fleet->child = 0; /* nobody to ask to end */
	fleet_stop(fleet);
}

Test(rdma_transfer, many_rooms_at_once)
{
	struct fleet_shape shape = {2, 1, 8, 2, 16, 20, 12, 128, 128};
	struct fleet *fleet = fleet_start(&shape);
	struct fleet_job jobs[24];
	fleet_fill(fleet);
	for (uint32_t i = 0; i < 24; i++) {
		uint32_t room = i / 2;
		uint64_t generation = i % 2 == 0 ? fleet_open(fleet, 0, room) : 0;
		struct kvs_pull pull = fleet_pull(fleet, i % 2, 0, room, generation);
		fleet_begin(&jobs[i], &pull);
	}
	for (uint32_t i = 0; i < 24; i++)
		cr_expect(fleet_end(&jobs[i]), "%s", jobs[i].text.s);
	for (uint32_t room = 0; room < 12; room++) {
		fleet_close(fleet, 0, room, KVS_ROOM_SUCCESS);
		cr_expect(fleet_wrong(fleet, room) == 0);
	}
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
	expect_clean();
}

Test(rdma_transfer, idle)
{
	struct fleet *fleet = start_up(&down);
	uint64_t before = fleet_decode_cpu_us(fleet);
	wait_ms(1000);
	cr_expect(fleet_decode_cpu_us(fleet) - before < 10000, "%llu us of CPU while idle",
	          (unsigned long long)(fleet_decode_cpu_us(fleet) - before));
	fleet_stop(fleet);
}
