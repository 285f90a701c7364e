/* SPDX-License-Identifier: Apache-2.0 */
/* Two processes: all kinds of memory, all pairs of sizes, every transport that carries GPU memory. */
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "world.h"

static const struct shape usual = {.layers = 3, .heads = 8, .page = 16, .items = 40, .k_width = 48, .v_width = 32};
/* Allocations of 2 MiB and more, several to a tensor. */
static const struct shape wide = {.layers = 1, .heads = 8, .page = 64, .items = 24, .k_width = 512, .v_width = 256};

static void all_rooms(struct world *w, const char *route)
{
	for (uint32_t d = 0; d < w->setting.d_size; d++) {
		struct room room = room_new(w, 100 + d, d, w->setting.shape.items / 2 + 1);
		struct answer answer = room_run(w, &room);
		CHECK(answer.ok, "%s", answer.text);
		uint64_t wrong = room_verify(w, &room, true);
		CHECK(wrong == 0, "%u to %u rank %u: %" PRIu64 " bytes are wrong", w->setting.p_size, w->setting.d_size,
		      d, wrong);
		room_end(w, &room, true);
	}
	CHECK(strstr(w->log, route) != NULL, "not over %s:\n%s", route, w->log);
}

static void run(const struct setting *setting, const char *route)
{
	static struct world w;
	world_new(&w, setting);
	all_rooms(&w, route);
	world_free(&w);
}

static void sweep(enum kvs_cuda_kind kind, const struct shape *shape, uint32_t parts, const char *transports,
                  const char *route)
{
	static const uint32_t sizes[][2] = {{4, 2}, {2, 4}, {8, 2}, {1, 4}, {2, 1}};
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		struct setting setting = {.shape = *shape,
		                          .p_size = sizes[i][0],
		                          .d_size = sizes[i][1],
		                          .p_kind = kind,
		                          .d_kind = kind,
		                          .parts = parts,
		                          .transports = transports};
		run(&setting, route);
	}
}

static void legacy(void)
{
	sweep(KVS_CUDA_LEGACY, &usual, 1, "cuda_ipc", "route: cuda_ipc");
}

static void vmm(void)
{
	sweep(KVS_CUDA_VMM, &wide, 3, "cuda_ipc", "route: cuda_ipc");
}

/* Memory whose owner allows no descriptors: handles that any message can carry. */
static void fabric(void)
{
	const struct driver *driver = driver_start(0);
	struct block block = block_new(driver, 0, KVS_CUDA_FABRIC, 4096, 1); /* skips where there are none */
	block_free(driver, &block);
	sweep(KVS_CUDA_FABRIC, &wide, 3, "cuda_ipc", "route: cuda_ipc");
}

/* Many descriptors: more than one message holds. */
static void vmm_many(void)
{
	struct setting setting = {.shape = wide,
	                          .p_size = 1,
	                          .d_size = 2,
	                          .p_kind = KVS_CUDA_VMM,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 20,
	                          .transports = "cuda_ipc"};
	setting.shape.items = 96;
	run(&setting, "route: cuda_ipc");
}

/* Report C1: memory that cannot be shared takes the next transport, and one line says which, why, and what helps. */
static void not_shareable(void)
{
	static const enum kvs_cuda_kind kinds[] = {KVS_CUDA_POOL, KVS_CUDA_PRIVATE, KVS_CUDA_MANAGED};
	static const char *const remedies[] = {"PYTORCH_CUDA_ALLOC_CONF=backend:native makes it shareable)",
	                                       "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False makes it shareable)",
	                                       "managed memory, which has no handle for another process)"};
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		struct setting setting = {.shape = usual,
		                          .p_size = 2,
		                          .d_size = 1,
		                          .p_kind = kinds[i],
		                          .d_kind = KVS_CUDA_LEGACY,
		                          .parts = 1,
		                          .transports = "cuda_ipc,host,tcp"};
		run(&setting, "route: host, then tcp (passed over: cuda_ipc: GPU memory at ");
		run(&setting, remedies[i]);
	}
}

/* The same when the driver refuses a handle that should exist. */
static void no_handle(void)
{
	struct setting setting = {.shape = usual,
	                          .p_size = 2,
	                          .d_size = 1,
	                          .p_kind = KVS_CUDA_LEGACY,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 1,
	                          .transports = "cuda_ipc,host",
	                          .environment = "KVS_DOUBLE_CUDA_FAULT=cuIpcGetMemHandle=1,cuIpcGetMemHandle=1"};
	need_double(driver_start(0));
	run(&setting, "cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE");
}

static void host_route(void)
{
	sweep(KVS_CUDA_LEGACY, &usual, 1, "host", "route: host");
}

static void tcp_route(void)
{
	sweep(KVS_CUDA_VMM, &usual, 1, "tcp", "route: tcp");
}

/* One side on a CPU, the other on a GPU. */
static void mixed(void)
{
	struct setting setting = {.shape = usual,
	                          .p_size = 2,
	                          .d_size = 1,
	                          .p_kind = KVS_CUDA_HOST,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 1,
	                          .transports = "cuda_ipc,host,tcp"};
	run(&setting, "route: host");
	setting.p_kind = KVS_CUDA_LEGACY;
	setting.d_kind = KVS_CUDA_HOST;
	run(&setting, "route: host");
}

static void two_devices(void)
{
	struct setting setting = {.shape = usual,
	                          .p_size = 2,
	                          .d_size = 1,
	                          .p_kind = KVS_CUDA_LEGACY,
	                          .d_kind = KVS_CUDA_VMM,
	                          .parts = 1,
	                          .p_device = 1,
	                          .d_device = 0,
	                          .transports = "cuda_ipc"};
	(void)driver_start(1);
	run(&setting, "route: cuda_ipc");
}

static void no_peer_access(void)
{
	struct setting setting = {.shape = usual,
	                          .p_size = 2,
	                          .d_size = 1,
	                          .p_kind = KVS_CUDA_LEGACY,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 1,
	                          .p_device = 1,
	                          .transports = "cuda_ipc,host"};
	setenv("KVS_DOUBLE_CUDA_NO_PEER", "1", 1);
	need_double(driver_start(0));
	run(&setting, "no peer access from the decode's GPU-6b767370-6c69-6365-2d67-707500000000 to the prefill's "
	              "GPU-6b767370-6c69-6365-2d67-707500000001");
}

/* Report C9: each process sees only its own GPU, under the same number. */
static void own_device_only(void)
{
	struct setting setting = {.shape = usual,
	                          .p_size = 2,
	                          .d_size = 1,
	                          .p_kind = KVS_CUDA_LEGACY,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 1,
	                          .transports = "cuda_ipc,host",
	                          .environment = "CUDA_VISIBLE_DEVICES=1"};
	setenv("CUDA_VISIBLE_DEVICES", "0", 1);
	need_double(driver_start(0));
	run(&setting,
	    "GPU-6b767370-6c69-6365-2d67-707500000001 is not visible to this process, which uses "
	    "GPU-6b767370-6c69-6365-2d67-707500000000: CUDA_VISIBLE_DEVICES (or the container's devices) must hold "
	    "both)");
}

/*
 * Report C9: two containers, in each of which the server is process 1. They are not taken for one process; a legacy
 * handle is refused by the driver, which is said with the remedy, and the next transport carries the pools.
 */
static void same_pid(void)
{
	struct setting setting = {.shape = usual,
	                          .p_size = 2,
	                          .d_size = 1,
	                          .p_kind = KVS_CUDA_LEGACY,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 1,
	                          .transports = "cuda_ipc,host,tcp",
	                          .apart = true};
	static struct world w;
	need_double(driver_start(0));
	world_new(&w, &setting);
	CHECK(getpid() == 1, "process %d", (int)getpid());
	all_rooms(&w, "route: host, then tcp (passed over: cuda_ipc: cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT");
	CHECK(strstr(w.log, "different pid namespaces") != NULL, "%s", w.log);
	world_free(&w);
}

/* Descriptors need no common namespace. */
static void same_pid_mapped(void)
{
	struct setting setting = {.shape = usual,
	                          .p_size = 2,
	                          .d_size = 1,
	                          .p_kind = KVS_CUDA_VMM,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 1,
	                          .transports = "cuda_ipc",
	                          .apart = true};
	need_double(driver_start(0));
	run(&setting, "route: cuda_ipc");
}

/* The same GPU under another number is found by its UUID. */
static void renumbered(void)
{
	struct setting setting = {.shape = usual,
	                          .p_size = 2,
	                          .d_size = 1,
	                          .p_kind = KVS_CUDA_LEGACY,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 1,
	                          .d_device = 0,
	                          .transports = "cuda_ipc",
	                          .environment = "CUDA_VISIBLE_DEVICES=1,0"};
	need_double(driver_start(0));
	setenv("KVS_DOUBLE_CUDA_NO_PEER", "1", 1);
	setting.p_device = 1; /* number 0 of the machine */
	run(&setting, "route: cuda_ipc");
}

/* Legacy memory is opened once for a process, however many ranks read it, and never written. */
static void opened_once(void)
{
	static struct world w;
	struct setting setting = {.shape = usual,
	                          .p_size = 1,
	                          .d_size = 4,
	                          .p_kind = KVS_CUDA_LEGACY,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 1,
	                          .transports = "cuda_ipc"};
	need_double(driver_start(0));
	world_new(&w, &setting);
	all_rooms(&w, "route: cuda_ipc");
	CHECK(w.driver->calls("cuIpcOpenMemHandle") == 1 && w.driver->live("ipc") == 1);
	CHECK(w.driver->calls("cuIpcCloseMemHandle") == 0);
	world_free(&w);
	CHECK(w.driver->calls("cuIpcCloseMemHandle") == 1);
}

/* Read-only where the driver can, read-write where it cannot. */
static void without_readonly(void)
{
	struct setting setting = {.shape = usual,
	                          .p_size = 1,
	                          .d_size = 2,
	                          .p_kind = KVS_CUDA_VMM,
	                          .d_kind = KVS_CUDA_VMM,
	                          .parts = 1,
	                          .transports = "cuda_ipc"};
	setenv("KVS_DOUBLE_CUDA_NO_READONLY", "1", 1);
	need_double(driver_start(0));
	run(&setting, "route: cuda_ipc");
}

/* A server may capture a graph on either side, at the handshake as well as in a transfer. */
static void capture(void)
{
	static struct world w;
	kvs_cu_stream stream;
	void *graph = NULL;
	struct setting setting = {.shape = usual,
	                          .p_size = 2,
	                          .d_size = 1,
	                          .p_kind = KVS_CUDA_VMM,
	                          .d_kind = KVS_CUDA_LEGACY,
	                          .parts = 1,
	                          .transports = "cuda_ipc,host"};
	world_new(&w, &setting);
	CHECK(w.driver->cuda->StreamCreateWithPriority(&stream, 1, 0) == 0);
	struct room room = room_new(&w, 7, 0, 10);
	struct message m = {.order = ORDER_CAPTURE, .number = 1};
	CHECK(peer_do(&w.peer, &m).number == 0);
	CHECK(w.driver->StreamBeginCapture(stream, KVS_CU_CAPTURE_MODE_GLOBAL) == 0);
	struct answer answer = room_run(&w, &room);
	CHECK(w.driver->StreamEndCapture(stream, &graph) == 0, "the decode's capture was broken");
	m.number = 0;
	CHECK(peer_do(&w.peer, &m).number == 0, "the prefill's capture was broken");
	CHECK(answer.ok, "%s", answer.text);
	CHECK(room_verify(&w, &room, true) == 0);
	room_end(&w, &room, true);
	CHECK(w.driver->GraphDestroy(graph) == 0);
	CHECK(w.driver->cuda->StreamDestroy(stream) == 0);
	world_free(&w);
}

const struct test transfer_tests[] = {{"transfer.legacy", legacy},
                                      {"transfer.vmm", vmm},
                                      {"transfer.fabric handles", fabric},
                                      {"transfer.vmm of many handles", vmm_many},
                                      {"transfer.not shareable", not_shareable},
                                      {"transfer.no handle", no_handle},
                                      {"transfer.host", host_route},
                                      {"transfer.tcp", tcp_route},
                                      {"transfer.host and GPU memory", mixed},
                                      {"transfer.two devices", two_devices},
                                      {"transfer.no peer access", no_peer_access},
                                      {"transfer.own device only", own_device_only},
                                      {"transfer.same pid, two namespaces", same_pid},
                                      {"transfer.same pid, mapped memory", same_pid_mapped},
                                      {"transfer.renumbered device", renumbered},
                                      {"transfer.opened once", opened_once},
                                      {"transfer.without read-only", without_readonly},
                                      {"transfer.capture", capture},
                                      {NULL, NULL}};
