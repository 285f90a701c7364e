/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times requests over the tcp transport between two processes, for scripts/bench-tcp, which reads the lines that begin
 * with "bench:". KVS_BENCH names what is measured; without it every case is skipped.
 */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "support/agent_bench.h"
#include "transport/state.h"
#include "transport/tcp.h"

#define REPEAT       5
#define IDLE_SECONDS 5

static void need(const char *what)
{
	bench_need(what, "tcp", 60000);
}

static void measure(const struct fleet_shape *shape, const char *what, uint32_t repeat)
{
	uint32_t most = shape->prefill_tp > shape->decode_tp ? shape->prefill_tp : shape->decode_tp;
	uint64_t bytes = bench_bytes(shape);
	struct fleet *fleet = fleet_start(shape);
	fleet_fill(fleet);
	(void)bench_request(fleet, most); /* makes the connections */
	for (uint32_t i = 0; i < repeat; i++) {
		printf("bench: %s pairs=1 seconds=%.6f bytes=%llu\n", what, bench_request(fleet, 1),
		       (unsigned long long)(bytes / most));
		printf("bench: %s pairs=%u seconds=%.6f bytes=%llu\n", what, most, bench_request(fleet, most),
		       (unsigned long long)bytes);
	}
	bench_end(fleet, what);
}

/* gpt-oss-120b: 8 heads of 64 values of 2 bytes, pages of 64 tokens, 8,192 tokens, 12 full-attention layers. */
Test(net_bench, down, .timeout = 120)
{
	need("down");
	measure(&(struct fleet_shape){4, 2, 8, 12, 64, 128, 1, 128, 128}, "down", REPEAT);
}

Test(net_bench, up, .timeout = 120)
{
	need("up");
	measure(&(struct fleet_shape){2, 4, 8, 12, 64, 128, 1, 128, 128}, "up", REPEAT);
}

/* 2 to 1, destinations in runs of each length, directly and copied once more; at 1 to 2 the same of sources. */
Test(net_bench, rule, .timeout = 240)
{
	need("rule");
	for (uint32_t run = 256; run <= 32768; run *= 2) {
		/* The oracle knows words up to 8 KiB of a head. */
		uint32_t width = run < 8192 ? run : 8192, heads = 2 * run / width;
		struct fleet_shape shape = {2, 1, heads, 1, 16, 0, 1, width, width};
		shape.pages = (64u << 20) / (4 * run * shape.page_size);
		for (int way = 0; way < 4; way++) {
			char what[64];
			shape.prefill_tp = way < 2 ? 2 : 1;
			shape.decode_tp = way < 2 ? 1 : 2;
			kvs_tcp_direct_min = way % 2 == 0 ? 0 : UINT64_MAX;
			(void)snprintf(what, sizeof(what), "rule run=%u side=%s copied=%d", run,
			               way < 2 ? "destination" : "source", way % 2);
			measure(&shape, what, 3);
		}
	}
}

/* Anonymous memory of a process, KiB. */
static unsigned long memory_of(pid_t pid)
{
	char name[64], line[128];
	unsigned long found = 0;
	(void)snprintf(name, sizeof(name), "/proc/%d/status", (int)pid);
	FILE *file = fopen(name, "r");
	cr_assert(file != NULL);
	while (fgets(line, sizeof(line), file) != NULL) {
		if (strncmp(line, "RssAnon:", 8) == 0)
			found = strtoul(line + 8, NULL, 10);
	}
	(void)fclose(file);
	return found;
}

static uint64_t own_cpu_us(void)
{
	struct rusage usage;
	getrusage(RUSAGE_SELF, &usage);
	return (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 +
	       (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* 16 by 4 ranks: 64 links, each with its control connection, 16 of them with a data connection. */
Test(net_bench, idle, .timeout = 60)
{
	need("idle");
	static const struct fleet_shape shape = {16, 4, 16, 2, 16, 64, 1, 128, 128};
	struct fleet *fleet = fleet_start_decode(&shape);
	struct kvs_verdict verdict;
	fleet_fill(fleet);
	unsigned long decode = memory_of(fleet->child), prefill = memory_of(getpid());
	fleet_join(fleet);
	for (uint32_t r = 0; r < shape.prefill_tp; r++) {
		for (uint32_t d = 0; d < shape.decode_tp; d++)
			kvs_peer_verdict(fleet->endpoints[r], fleet->peers[d], 0, &verdict);
	}
	cr_assert(fleet_log_count(": route: tcp") >= 64, "%u", fleet_log_count(": route: tcp"));
	unsigned long decode_linked = memory_of(fleet->child), prefill_linked = memory_of(getpid());
	cr_assert(fleet_transfer(fleet, 0) && fleet_wrong(fleet, 0) == 0);
	unsigned long decode_used = memory_of(fleet->child), prefill_used = memory_of(getpid());
	uint64_t decode_cpu = fleet_decode_cpu_us(fleet), prefill_cpu = own_cpu_us();
	struct timespec time = {.tv_sec = IDLE_SECONDS};
	nanosleep(&time, NULL);
	/* The question itself costs the decode's process something. */
	uint64_t asked = fleet_decode_cpu_us(fleet), again = fleet_decode_cpu_us(fleet);
	prefill_cpu = own_cpu_us() - prefill_cpu;
	printf("bench: idle seconds=%d peers=64 streams=16 decode_us=%llu prefill_us=%llu asking_us=%llu "
	       "decode_kib=%lu "
	       "prefill_kib=%lu decode_used_kib=%lu prefill_used_kib=%lu\n",
	       IDLE_SECONDS, (unsigned long long)(asked - decode_cpu), (unsigned long long)prefill_cpu,
	       (unsigned long long)(again - asked), decode_linked - decode, prefill_linked - prefill,
	       decode_used - decode_linked, prefill_used - prefill_linked);
	fflush(stdout);
	fleet_stop(fleet);
}
