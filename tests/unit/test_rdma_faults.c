/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of libibverbs that fail, and devices that promise less than they have: hooks in the product's own table of
 * functions, so that the same cases run over the double and, with KVS_TEST_VERBS=real, over the machine's devices
 * (tests/vm). What is registered and made is counted there too.
 */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "doubles/verbs/double.h"
#include "support/agent_fleet.h"
#include "transport/verbs.h"

enum side {
	PREFILL,
	DECODE,
	SIDES,
};

/* Of all processes. */
struct counts {
	atomic_int regions[SIDES];     /* now */
	atomic_int queue_pairs[SIDES]; /* now */
};

static struct verbs_double *verbs; /* NULL: real devices */
static struct kvs_verbs real;
static struct counts *counts;
static enum side self;

/* What is to go wrong, the same in both processes. */
static struct {
	enum side side;
	int reg, reg_errno; /* the n-th registration (1: the first; 0: none) ... */
	int qp, qp_errno;   /* ... or queue pair */
	bool once;          /* that one alone; else every later one too */
	int sge, depth;     /* limits of the device; 0: its own */
	int rd_atom;        /* more READs at a time are refused with ENOMEM from the second queue pair on; 0: never */
	uint64_t stale;     /* the key of the region that begins there is that of a region that is gone */
} fault;

static int registrations, queue_pairs;

static bool is_hit(int number, int fatal)
{
	return self == fault.side && fatal > 0 && (fault.once ? number == fatal : number >= fatal);
}

static int hooked_query_device(struct kvs_ibv_context *context, struct kvs_ibv_device_attr *attr_p)
{
	int error = real.query_device(context, attr_p);
	if (fault.sge > 0)
		attr_p->max_sge = attr_p->max_sge_rd = fault.sge;
	if (fault.depth > 0)
		attr_p->max_qp_wr = fault.depth;
	return error;
}

static struct kvs_ibv_mr *hooked_reg_mr(struct kvs_ibv_pd *pd, void *address, size_t length, int access)
{
	if (is_hit(++registrations, fault.reg)) {
		errno = fault.reg_errno;
		return NULL;
	}
	struct kvs_ibv_mr *mr = real.reg_mr(pd, address, length, access);
	if (mr == NULL)
		return NULL;
	counts->regions[self]++;
	if ((uint64_t)(uintptr_t)address == fault.stale && self == PREFILL) {
		struct kvs_ibv_mr *again = real.reg_mr(pd, address, length, access);
		cr_assert(again != NULL);
		uint32_t gone = mr->rkey;
		real.dereg_mr(mr);
		cr_assert(again->rkey != gone);
		again->rkey = gone;
		return again;
	}
	return mr;
}

static int hooked_dereg_mr(struct kvs_ibv_mr *mr)
{
	counts->regions[self]--;
	return real.dereg_mr(mr);
}

static struct kvs_ibv_qp *hooked_create_qp(struct kvs_ibv_pd *pd, struct kvs_ibv_qp_init_attr *attr)
{
	if (is_hit(++queue_pairs, fault.qp)) {
		errno = fault.qp_errno;
		return NULL;
	}
	struct kvs_ibv_qp *qp = real.create_qp(pd, attr);
	if (qp != NULL)
		counts->queue_pairs[self]++;
	return qp;
}

static int hooked_destroy_qp(struct kvs_ibv_qp *qp)
{
	counts->queue_pairs[self]--;
	return real.destroy_qp(qp);
}

static int hooked_modify_qp(struct kvs_ibv_qp *qp, struct kvs_ibv_qp_attr *attr, int mask)
{
	if (fault.rd_atom > 0 && queue_pairs > 1 && (mask & KVS_IBV_QP_MAX_DEST_RD_ATOMIC) != 0 &&
	    attr->max_dest_rd_atomic > fault.rd_atom)
		return ENOMEM;
	return real.modify_qp(qp, attr, mask);
}

static void in_decode(void)
{
	self = DECODE;
	registrations = queue_pairs = 0;
}

static void load(void)
{
	const char *choice = getenv("KVS_TEST_VERBS");
	struct kvs_text text;
	if (choice == NULL || strcmp(choice, "real") != 0) {
		void *library = dlopen(KVS_VERBS_DOUBLE, RTLD_NOW | RTLD_GLOBAL);
		cr_assert(library != NULL, "%s", dlerror());
		verbs = dlsym(library, "kvs_verbs_double");
	}
	/* The table is constant for the product alone. */
	struct kvs_verbs *table = (struct kvs_verbs *)(uintptr_t)kvs_verbs_load(&text);
	cr_assert(table != NULL, "%s", text.s);
	real = *table;
	table->query_device = hooked_query_device;
	table->reg_mr = hooked_reg_mr;
	table->dereg_mr = hooked_dereg_mr;
	table->create_qp = hooked_create_qp;
	table->destroy_qp = hooked_destroy_qp;
	table->modify_qp = hooked_modify_qp;
	counts = mmap(NULL, sizeof(*counts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	cr_assert(counts != MAP_FAILED);
	fleet_child_setup = in_decode;
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma,tcp";
}

TestSuite(rdma_faults, .init = load, .timeout = 300);

static const struct fleet_shape down = {2, 1, 8, 3, 16, 40, 4, 128, 128};
static const struct fleet_shape up = {1, 2, 8, 3, 16, 40, 4, 128, 128};

static void wait_ms(unsigned ms)
{
	struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
	nanosleep(&time, NULL);
}

static struct fleet *begin(const struct fleet_shape *shape)
{
	registrations = queue_pairs = 0;
	struct fleet *fleet = fleet_start(shape);
	fleet_fill(fleet);
	return fleet;
}

static void expect_room(struct fleet *fleet, uint32_t room)
{
	cr_expect(fleet_transfer(fleet, room));
	cr_expect(fleet_wrong(fleet, room) == 0, "room %u: %llu bytes wrong", room,
	          (unsigned long long)fleet_wrong(fleet, room));
}

/* Nothing is left of what was registered and made. */
static void end(struct fleet *fleet)
{
	cr_expect(fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
	fleet_log_clear();
	for (int side = 0; side < SIDES; side++) {
		cr_expect(counts->regions[side] == 0, "side %d: %d regions are left", side, counts->regions[side]);
		cr_expect(counts->queue_pairs[side] == 0, "side %d: %d queue pairs are left", side,
		          counts->queue_pairs[side]);
	}
}

/* The next transport carries all rooms, the reason is named, and what had been registered before is free again. */
static void expect_fallback(const struct fleet_shape *shape, const char *call, const char *reason)
{
	struct fleet *fleet = begin(shape);
	expect_room(fleet, 0);
	expect_room(fleet, 1);
	cr_expect(fleet_log_count(call) > 0, "nothing says: %s", call);
	cr_expect(fleet_log_count(reason) > 0, "nothing says: %s", reason);
	cr_expect(fleet_log_count("done: route=tcp") == 2 * shape->decode_tp);
	if (fault.reg > 0)
		cr_expect(counts->regions[fault.side] == 0, "%d regions stay after one was refused",
		          counts->regions[fault.side]);
	end(fleet);
}

static const struct {
	int error;
	const char *text;
} errors[] = {
        {ENOMEM, "Cannot allocate memory"},
        {EFAULT, "Bad address"},
        {EINVAL, "Invalid argument"},
        {EIO, "Input/output error"},
};

/* As above, where the failing rank has slots: a link of two may have got its memory. */
static void expect_slots(const struct fleet_shape *shape, const char *reason)
{
	struct fleet *fleet = begin(shape);
	expect_room(fleet, 0);
	expect_room(fleet, 1);
	cr_expect(fleet_log_count("cannot register") > 0 && fleet_log_count(reason) > 0, "nothing says: %s", reason);
	cr_expect(fleet_log_count("done: route=tcp") == 2 * shape->decode_tp);
	end(fleet);
}

Test(rdma_faults, registration)
{
	static const int positions[] = {1, 3, 6};
	for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
		fault.reg_errno = errors[i].error;
		fault.reg = positions[i % 3];
		fault.side = DECODE;
		expect_fallback(&down, "cannot register", errors[i].text);
		fault.side = PREFILL;
		expect_fallback(&down, "at the prefill: ", errors[i].text);
	}
	fault.reg = 7; /* that of the slots */
	expect_slots(&up, errors[3].text);
}

Test(rdma_faults, registration_of_one_link)
{
	/* Two links of one decode rank: the first finds no memory, the second does, and both parts arrive. */
	fault.reg = 3;
	fault.reg_errno = ENOMEM;
	fault.once = true;
	fault.side = DECODE;
	struct fleet *fleet = begin(&down);
	expect_room(fleet, 0);
	cr_expect(fleet_log_count("rdma cannot be used") == 1);
	cr_expect(fleet_log_count("rdma is up") == 1);
	end(fleet);
}

Test(rdma_faults, queue_pair)
{
	for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
		fault.qp = 1;
		fault.qp_errno = errors[i].error;
		for (int side = 0; side < SIDES; side++) {
			fault.side = (enum side)side;
			expect_fallback(i % 2 == 0 ? &down : &up, "ibv_create_qp with ", errors[i].text);
		}
	}
}

/* Every rank pair needs one, and a device has no more: what there is carries its share, the rest goes another way. */
static void expect_some(const struct fleet_shape *shape, uint32_t links)
{
	struct fleet *fleet = begin(shape);
	expect_room(fleet, 0);
	expect_room(fleet, 1);
	cr_expect(fleet_log_count("rdma is up") == (uint32_t)fault.qp - 1, "%u", fleet_log_count("rdma is up"));
	cr_expect(fleet_log_count("rdma cannot be used") == links - (uint32_t)fault.qp + 1, "%u of %u",
	          fleet_log_count("rdma cannot be used"), links);
	end(fleet);
}

Test(rdma_faults, few_queue_pairs)
{
	fault.side = DECODE;
	fault.qp = 5;
	fault.qp_errno = ENOMEM;
	expect_some(&(struct fleet_shape){16, 1, 16, 1, 16, 4, 2, 64, 64}, 16);
	expect_some(&(struct fleet_shape){2, 16, 16, 1, 16, 4, 2, 64, 64}, 16);
}

Test(rdma_faults, one_read_for_each_but_the_first)
{
	fault.rd_atom = 1;
	struct fleet *fleet = begin(&(struct fleet_shape){4, 1, 8, 1, 16, 10, 2, 128, 128});
	expect_room(fleet, 0);
	expect_room(fleet, 1);
	cr_expect(fleet_log_count("done: route=rdma components=1") == 2);
	cr_expect(fleet_log_count(" 1 READs at a time") >= 3, "%u", fleet_log_count(" 1 READs at a time"));
	end(fleet);
}

static void expect_limits(const char *text)
{
	const struct fleet_shape *shapes[] = {&down, &up};
	for (int i = 0; i < 2; i++) {
		struct fleet *fleet = begin(shapes[i]);
		expect_room(fleet, 0);
		expect_room(fleet, 1);
		cr_expect(fleet_log_count(text) == 2, "%s: %u lines", text, fleet_log_count(text));
		cr_expect(fleet_log_count("done: route=rdma components=1") == 2 * shapes[i]->decode_tp);
		end(fleet);
	}
}

Test(rdma_faults, short_list)
{
	fault.sge = 1;
	expect_limits(", scatter 1,");
	fault.sge = 4;
	expect_limits(", scatter 4,");
}

Test(rdma_faults, shallow_queue)
{
	fault.depth = 16;
	expect_limits(", depth 15,");
	fault.sge = 1;
	expect_limits(", depth 15, scatter 1,");
}

/* ---- keys and peers that are gone ---- */

static struct fleet *begin_with_stale_key(void)
{
	registrations = queue_pairs = 0;
	struct fleet *fleet = fleet_start_decode(&down);
	fault.stale = fleet->prefill[0]->components[0].tensors[0].address;
	fleet_join(fleet);
	fleet_fill(fleet);
	return fleet;
}

Test(rdma_faults, stale_key_and_no_other_way)
{
	struct kvs_text text = {.s = ""};
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma";
	struct fleet *fleet = begin_with_stale_key();
	uint64_t generation = fleet_open(fleet, 0, 0);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
	cr_expect(!kvs_pull(&pull, &text));
	cr_expect(strstr(text.s, "remote access error (status 10") != NULL, "%s", text.s);
	cr_expect(fleet_touched(fleet, 0) == 0, "%llu bytes were written", (unsigned long long)fleet_touched(fleet, 0));
	fleet_close(fleet, 0, 0, KVS_ROOM_FAILURE);
	/* The other rank's memory, in another room, is as good as before. */
	generation = fleet_open(fleet, 0, 1);
	pull = fleet_pull(fleet, 1, 0, 1, generation);
	cr_expect(kvs_pull(&pull, &text), "%s", text.s);
	fleet_close(fleet, 0, 1, KVS_ROOM_FAILURE);
	end(fleet);
}

Test(rdma_faults, stale_key)
{
	struct fleet *fleet = begin_with_stale_key();
	expect_room(fleet, 0);
	cr_expect(fleet_log_count("remote access error (status 10") > 0);
	expect_room(fleet, 1);
	end(fleet);
}

/* The prefill's own process: everything of one rank, until it is killed. */
static void prefill_main(struct fleet *fleet, uint64_t generation)
{
	fleet_join(fleet);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
	(void)kvs_pull(&pull, NULL);
	_exit(0);
}

Test(rdma_faults, prefill_killed_in_mid_read)
{
	static const struct fleet_shape shape = {2, 1, 8, 4, 64, 100, 2, 128, 128};
	fleet_prefill_config.transports = fleet_decode_config.transports = "rdma";
	if (verbs != NULL)
		verbs->device.delay_us = 100000; /* each 4 MiB */
	registrations = queue_pairs = 0;
	struct fleet *fleet = fleet_start_decode(&shape);
	fleet_fill(fleet);
	uint64_t generation = fleet_open(fleet, 0, 0);
	pid_t prefill = fork();
	cr_assert(prefill >= 0);
	if (prefill == 0)
		prefill_main(fleet, generation);
	for (int i = 0; i < 20000 && !fleet_reached(fleet, 0, 10); i++)
		wait_ms(1);
	cr_assert(fleet_reached(fleet, 0, 10));
	cr_assert(kill(prefill, SIGKILL) == 0 && waitpid(prefill, NULL, 0) == prefill);
	cr_expect(!fleet_reached(fleet, 0, 99), "the transfer was over before the prefill was killed");
	struct kvs_text text = {.s = ""};
	int waited = 0;
	while (fleet_state(fleet, 0, 0, &text) != KVS_ROOM_FAILED && waited++ < 300)
		wait_ms(10);
	cr_expect(waited < 300, "the decode has not noticed in 3 s");
	cr_expect(strstr(text.s, "went away in mid-transfer") != NULL || strstr(text.s, "READ of") != NULL, "%s",
	          text.s);
	fleet_close(fleet, 0, 0, KVS_ROOM_FAILURE);
	uint64_t touched = fleet_touched(fleet, 0);
	wait_ms(200);
	cr_expect(fleet_touched(fleet, 0) == touched, "bytes landed after the close");
	/* The prefill is started again: other keys, other queue pairs, and the decode is as good as before. */
	counts->regions[PREFILL] = counts->queue_pairs[PREFILL] = 0;
	fleet_join(fleet);
	expect_room(fleet, 1);
	cr_expect(fleet_log_count("done: route=rdma components=1") == 1);
	end(fleet);
}
