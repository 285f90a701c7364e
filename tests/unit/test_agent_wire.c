/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the wire and the other side may do to a transfer: bytes changed on their way, messages played again, a peer that
 * stops answering. A proxy stands between prefill and decode where the wire is what misbehaves.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/agent_faults.h"
#include "support/agent_fleet.h"
#include "transport/record.h"
#include "transport/sock.h"
#include "transport/state.h"
#include "transport/wire.h"

#define WIRES 16

static const struct fleet_shape small = {2, 1, 8, 2, 16, 4, 3, 128, 128};
/* More than all buffers between the two hold. */
static const struct fleet_shape big = {1, 2, 8, 4, 64, 120, 2, 256, 256};

static struct {
	pthread_t thread;
	int listener;
	struct kvs_record target;
	struct pollfd fds[1 + 2 * WIRES]; /* the listener, then the prefill's end and the decode's of each wire */
	uint32_t wires;
	uint64_t sent[WIRES]; /* by the prefill */
	bool data[WIRES];     /* carries a link's bytes */
	uint8_t heard[8192];  /* the first wire, from the prefill */
	atomic_size_t heard_size;
	atomic_ulong flip; /* the byte of a data connection's stream that is changed; 0: none */
	atomic_bool flipped;
	atomic_bool stop;
} proxy;

static void add_wire(void)
{
	struct kvs_text text = {.s = ""};
	int fd = accept(proxy.listener, NULL, NULL);
	cr_assert(fd >= 0 && proxy.wires < WIRES);
	int onward = kvs_connect_tcp(&proxy.target, 5000, &text);
	cr_assert(onward >= 0, "%s", text.s);
	struct pollfd writable = {.fd = onward, .events = POLLOUT};
	(void)poll(&writable, 1, 5000);
	proxy.fds[1 + 2 * proxy.wires] = (struct pollfd){.fd = fd, .events = POLLIN};
	proxy.fds[2 + 2 * proxy.wires] = (struct pollfd){.fd = onward, .events = POLLIN};
	proxy.wires++;
}

/* What the prefill sends: note it, and change a byte. */
static void touch(uint32_t wire, uint8_t *data, size_t size)
{
	struct kvs_wire_header header;
	if (proxy.sent[wire] == 0 && size >= sizeof(header)) {
		memcpy(&header, data, sizeof(header));
		proxy.data[wire] = header.type == KVS_MESSAGE_DATA;
	}
	if (wire == 0 && proxy.heard_size + size <= sizeof(proxy.heard)) {
		memcpy(proxy.heard + proxy.heard_size, data, size);
		proxy.heard_size += size;
	}
	uint64_t at = atomic_load(&proxy.flip);
	if (proxy.data[wire] && at > 0 && at >= proxy.sent[wire] && at < proxy.sent[wire] + size) {
		data[at - proxy.sent[wire]] ^= 0x10;
		atomic_store(&proxy.flipped, true);
	}
	proxy.sent[wire] += size;
}

static void forward(uint32_t end)
{
	uint8_t data[16384];
	uint32_t other = end % 2 == 1 ? end + 1 : end - 1;
	if (proxy.fds[end].fd < 0)
		return;
	ssize_t got = recv(proxy.fds[end].fd, data, sizeof(data), MSG_DONTWAIT);
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got <= 0) {
		shutdown(proxy.fds[other].fd, SHUT_RDWR);
		close(proxy.fds[end].fd);
		proxy.fds[end].fd = -1; /* poll passes it over */
		return;
	}
	if (end % 2 == 1)
		touch((end - 1) / 2, data, (size_t)got);
	for (ssize_t sent = 0; sent < got && proxy.fds[other].fd >= 0;) {
		ssize_t n = send(proxy.fds[other].fd, data + sent, (size_t)(got - sent), MSG_NOSIGNAL);
		struct pollfd writable = {.fd = proxy.fds[other].fd, .events = POLLOUT};
		if (n < 0 && errno != EAGAIN && errno != EINTR)
			return;
		if (n < 0)
			(void)poll(&writable, 1, 1000);
		sent += n > 0 ? n : 0;
	}
}

static void *proxy_main(void *unused)
{
	(void)unused;
	while (!atomic_load(&proxy.stop)) {
		uint32_t count = 1 + 2 * proxy.wires;
		if (poll(proxy.fds, count, 20) <= 0)
			continue;
		for (uint32_t i = 1; i < count; i++) {
			if (proxy.fds[i].revents != 0)
				forward(i);
		}
		if (proxy.fds[0].revents != 0)
			add_wire();
	}
	return NULL;
}

/* A fleet whose prefill takes the decode's first rank for one on another host, reached through the proxy. */
static struct fleet *start_behind_proxy(const struct fleet_shape *shape)
{
	struct fleet *fleet = fleet_start_decode(shape);
	struct kvs_record *record = (struct kvs_record *)(void *)fleet->records[0];
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t size = sizeof(address);
	proxy.target = *record;
	proxy.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	cr_assert(bind(proxy.listener, (struct sockaddr *)&address, size) == 0 && listen(proxy.listener, WIRES) == 0 &&
	          getsockname(proxy.listener, (struct sockaddr *)&address, &size) == 0);
	proxy.fds[0] = (struct pollfd){.fd = proxy.listener, .events = POLLIN};
	record->boot_id[0] ^= 1;
	record->tcp_port = ntohs(address.sin_port);
	fleet_fill(fleet);
	cr_assert(pthread_create(&proxy.thread, NULL, proxy_main, NULL) == 0);
	fleet_join(fleet);
	return fleet;
}

static void stop_proxy(void)
{
	atomic_store(&proxy.stop, true);
	pthread_join(proxy.thread, NULL);
	for (uint32_t i = 0; i < 1 + 2 * proxy.wires; i++) {
		if (proxy.fds[i].fd >= 0)
			close(proxy.fds[i].fd);
	}
}

/* One byte of the stream differs on arrival, as a bad switch or card would have it. */
static void one_byte_changed(bool verify)
{
	fleet_prefill_config.verify = fleet_decode_config.verify = verify;
	struct fleet *fleet = start_behind_proxy(&small);
	struct kvs_text text = {.s = ""};
	cr_expect(fleet_transfer(fleet, 0) && fleet_wrong(fleet, 0) == 0, "the proxy alone changes nothing");
	atomic_store(&proxy.flip, 200000); /* in the second room: each of the pair's streams has 131,072 bytes a room */
	bool moved = fleet_transfer(fleet, 1);
	cr_expect(atomic_load(&proxy.flipped));
	cr_expect(moved == !verify, "verify %d", verify);
	cr_expect(fleet_wrong(fleet, 1) > 0);
	cr_expect((fleet_log_count("KVSPLICE_VERIFY: component 0 chunk 0") > 0) == verify);
	cr_expect((fleet_log_count("over tcp: the bytes in place are not those that were sent") > 0) == verify);
	cr_expect(kvs_source_failed(fleet->endpoints[0], 2, &text) == verify ||
	          kvs_source_failed(fleet->endpoints[1], 2, &text) == verify);
	/* The room's trouble is not the peer's. */
	atomic_store(&proxy.flip, 0);
	cr_expect(fleet_transfer(fleet, 2) && fleet_wrong(fleet, 2) == 0 && fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
	stop_proxy();
}

Test(agent_wire, changed_byte_is_found, .timeout = 60)
{
	one_byte_changed(true);
}

/* What the case above would miss if the proxy did nothing. */
Test(agent_wire, changed_byte_without_verify, .timeout = 60)
{
	one_byte_changed(false);
}

/* The same in shared memory. */
Test(agent_wire, changed_byte_in_staging, .timeout = 60)
{
	for (int verify = 0; verify < 2; verify++) {
		fleet_prefill_config.verify = fleet_decode_config.verify = verify == 1;
		fleet_prefill_config.transports = fleet_decode_config.transports = "host";
		fault_change();
		struct fleet *fleet = fleet_start(&small);
		fleet_fill(fleet);
		cr_expect(fleet_transfer(fleet, 0) && fleet_wrong(fleet, 0) == 0);
		atomic_store(&fault_changes_byte, true);
		cr_expect(fleet_transfer(fleet, 1) == (verify == 0));
		cr_expect(fleet_wrong(fleet, 1) > 0);
		cr_expect((fleet_log_count("over host: the bytes in place are not those that were sent") > 0) ==
		          (verify == 1));
		atomic_store(&fault_changes_byte, false);
		cr_expect(fleet_transfer(fleet, 2) && fleet_wrong(fleet, 2) == 0 && fleet_strayed(fleet) == 0);
		fleet_stop(fleet);
	}
}

/* All that a prefill with the right key and secret has said, said again by somebody who heard it. */
Test(agent_wire, heard_and_said_again, .timeout = 60)
{
	char name[] = "/tmp/kvsplice-test-XXXXXX";
	int file = mkstemp(name);
	cr_assert(file >= 0 && write(file, "0123456789abcdef", 16) == 16);
	close(file);
	fleet_prefill_config.secret_file = fleet_decode_config.secret_file = name;
	struct fleet *fleet = start_behind_proxy(&small);
	struct kvs_text text = {.s = ""};
	struct kvs_verdict verdict;
	cr_expect(fleet_transfer(fleet, 0) && fleet_wrong(fleet, 0) == 0);
	kvs_peer_verdict(fleet->endpoints[0], fleet->peers[0], 0, &verdict);
	uint64_t generation = fleet_open(fleet, 0, 0), touched = fleet_touched(fleet, 1);
	size_t size = proxy.heard_size;
	cr_assert(size > 200 && generation > 0, "%zu", size);
	int fd = kvs_connect_tcp(&proxy.target, 1000, &text);
	struct pollfd ready = {.fd = fd, .events = POLLOUT};
	cr_assert(fd >= 0 && poll(&ready, 1, 1000) == 1);
	cr_assert(send(fd, proxy.heard, size, MSG_NOSIGNAL) == (ssize_t)size);
	char answer[4096];
	ssize_t got = 1;
	ready.events = POLLIN;
	while (got > 0 && poll(&ready, 1, 2000) == 1)
		got = recv(fd, answer, sizeof(answer), 0);
	cr_expect(got <= 0, "still connected");
	close(fd);
	/* The log's line is written after the connection is closed. */
	for (int i = 0; i < 1000 && fleet_log_count("does not know the decode's secret") == 0; i++)
		usleep(1000);
	cr_expect(fleet_log_count("does not know the decode's secret") > 0);
	cr_expect(fleet_touched(fleet, 1) == touched);
	fleet_close(fleet, 0, 0, KVS_ROOM_FAILURE);
	cr_expect(fleet_transfer(fleet, 2) && fleet_wrong(fleet, 2) == 0 && fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
	stop_proxy();
	unlink(name);
}

/* The decode's process is stopped in mid-transfer. */
static void decode_stops(const char *transport)
{
	/* Under TSan the first move of these bytes takes up to 2 s. */
	enum { TIMEOUT_MS = 5000, GRACE_MS = 1000, SLACK_MS = 500 };
	struct kvs_text text = {.s = ""};
	struct fleet_job job;
	fleet_prefill_config.transports = fleet_decode_config.transports = transport;
	fleet_prefill_config.timeout_ms = TIMEOUT_MS;
	struct fleet *fleet = fleet_start(&big);
	fleet_fill(fleet);
	uint64_t generation = fleet_open(fleet, 0, 0);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
	fleet_begin(&job, &pull);
	while (!fleet_reached(fleet, 0, 0) && !job.done)
		usleep(100);
	kill(fleet->child, SIGSTOP);
	bool whole = job.done;
	bool ok = fleet_end(&job);
	cr_assert(!whole, "over before it could be stopped");
	cr_expect(!ok && strstr(job.text.s, "5000 ms") != NULL, "%s", job.text.s);
	cr_expect(job.ended_ns - job.began_ns < (uint64_t)(TIMEOUT_MS + GRACE_MS + SLACK_MS) * 1000000);
	cr_expect(kvs_source_failed(fleet->endpoints[0], 1, &text) && strstr(text.s, "5000 ms") != NULL, "%s", text.s);
	kill(fleet->child, SIGCONT);
	fleet_close(fleet, 0, 0, KVS_ROOM_FAILURE);
	uint64_t touched = fleet_touched(fleet, 0);
	usleep(200000);
	cr_expect(fleet_touched(fleet, 0) == touched, "written after the close");
	cr_expect(fleet_touched(fleet, 1) == 0 && fleet_strayed(fleet) == 0);
	/* It answers again. */
	cr_expect(fleet_transfer(fleet, 1) && fleet_wrong(fleet, 1) == 0);
	fleet_stop(fleet);
}

Test(agent_wire, decode_stops_tcp, .timeout = 60)
{
	decode_stops("tcp");
}

Test(agent_wire, decode_stops_host, .timeout = 60)
{
	decode_stops("host");
}
