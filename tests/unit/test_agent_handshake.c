/* SPDX-License-Identifier: Apache-2.0 */
/* Who is let in, and what happens to everybody else. */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/agent_fleet.h"
#include "support/random.h"
#include "transport/message.h"
#include "transport/record.h"
#include "transport/sock.h"
#include "transport/state.h"

static const struct fleet_shape small = {2, 1, 8, 2, 16, 4, 2, 128, 128};

static const char *secret_file(const char *secret)
{
	static char names[4][64];
	static int next;
	char *name = names[next++ % 4];
	(void)snprintf(name, sizeof(names[0]), "/tmp/kvsplice-test-XXXXXX");
	int fd = mkstemp(name);
	cr_assert(fd >= 0 && write(fd, secret, strlen(secret)) == (ssize_t)strlen(secret));
	close(fd);
	return name;
}

static bool reaches(struct fleet *fleet, struct kvs_text *text)
{
	struct kvs_verdict verdict;
	kvs_peer_verdict(fleet->endpoints[0], fleet->peers[0], 0, &verdict);
	*text = verdict.text;
	return verdict.action == KVS_ACT_SLICE;
}

static void secrets(const char *prefill, const char *decode, bool right, const char *expected)
{
	struct kvs_text text;
	fleet_prefill_config.secret_file = prefill == NULL ? NULL : secret_file(prefill);
	fleet_decode_config.secret_file = decode == NULL ? NULL : secret_file(decode);
	struct fleet *fleet = fleet_start(&small);
	fleet_fill(fleet);
	cr_expect(reaches(fleet, &text) == right, "%s", text.s);
	cr_expect(right || strstr(text.s, expected) != NULL, "%s", text.s);
	cr_expect(fleet_transfer(fleet, 0) == right);
	cr_expect(right ? fleet_wrong(fleet, 0) == 0 : fleet_touched(fleet, 0) == 0);
	fleet_stop(fleet);
	if (prefill != NULL)
		unlink(fleet_prefill_config.secret_file);
	if (decode != NULL)
		unlink(fleet_decode_config.secret_file);
}

Test(agent_handshake, secret_right, .timeout = 60)
{
	secrets("0123456789abcdef\n", "0123456789abcdef", true, "");
}

Test(agent_handshake, secret_wrong, .timeout = 60)
{
	secrets("0123456789abcdef", "0123456789abcdeF", false, "KVSPLICE_SECRET_FILE differs");
}

Test(agent_handshake, secret_missing_at_the_decode, .timeout = 60)
{
	secrets("0123456789abcdef", NULL, false, "set at the prefill and not at the decode");
}

Test(agent_handshake, secret_missing_at_the_prefill, .timeout = 60)
{
	secrets(NULL, "0123456789abcdef", false, "set at the decode and not at the prefill");
}

Test(agent_handshake, secret_files)
{
	struct kvs_agent_config config = fleet_prefill_config;
	struct kvs_text text;
	config.secret_file = "/nonexistent/secret";
	cr_expect(!kvs_agent_configure(&config, &text) && strstr(text.s, "No such file") != NULL, "%s", text.s);
	config.secret_file = secret_file("short");
	cr_expect(!kvs_agent_configure(&config, &text) && strstr(text.s, "5 bytes") != NULL, "%s", text.s);
	unlink(config.secret_file);
	config.secret_file = secret_file("0123456789abcdef");
	chmod(config.secret_file, 0644);
	cr_expect(!kvs_agent_configure(&config, &text) && strstr(text.s, "chmod 600") != NULL, "%s", text.s);
	unlink(config.secret_file);
	config.secret_file = NULL;
	config.timeout_ms = 0;
	cr_expect(!kvs_agent_configure(&config, &text) && strstr(text.s, "KVSPLICE_TIMEOUT_MS") != NULL);
	config.timeout_ms = 1;
	config.transports = "host,nothing";
	cr_expect(!kvs_agent_configure(&config, &text) && strstr(text.s, "'nothing'") != NULL);
	config.transports = "host";
	config.listen = "127.0.0.1:0";
	cr_expect(!kvs_agent_configure(&config, &text) && strstr(text.s, "KVSPLICE_LISTEN") != NULL);
}

/* The record of a decode, changed by the test; what the prefill says about it. */
static void altered(void (*change)(struct kvs_record *), const char *expected)
{
	struct fleet *fleet = fleet_start_decode(&small);
	struct kvs_text text;
	change((struct kvs_record *)(void *)fleet->records[0]);
	uint64_t began = kvs_now_ns();
	fleet_join(fleet);
	cr_expect(!reaches(fleet, &text) && strstr(text.s, expected) != NULL, "%s", text.s);
	cr_expect(!reaches(fleet, &text), "and again");
	cr_expect(kvs_now_ns() - began < 1000000000u);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, fleet_open(fleet, 0, 0));
	memset(text.s, 0, sizeof(text.s));
	cr_expect(!kvs_pull(&pull, &text) && text.s[0] != '\0');
	fleet_stop(fleet);
}

static void wrong_key(struct kvs_record *record)
{
	record->key[3] ^= 1;
}

static void wrong_endpoint(struct kvs_record *record)
{
	record->endpoint += 1000;
}

static void wrong_pid(struct kvs_record *record)
{
	record->pid = 1;
	record->tcp_family = 0;
}

static void wrong_start(struct kvs_record *record)
{
	record->start_time++;
	record->tcp_family = 0;
}

static void nobody_there(struct kvs_record *record)
{
	record->unix_name[12] ^= 1;
	record->tcp_port = 1;
}

Test(agent_handshake, wrong_key, .timeout = 60)
{
	altered(wrong_key, "the decode ended the handshake");
}

Test(agent_handshake, wrong_endpoint, .timeout = 60)
{
	altered(wrong_endpoint, "no such endpoint");
}

Test(agent_handshake, another_process, .timeout = 60)
{
	altered(wrong_pid, "not 1 as it claims");
}

Test(agent_handshake, an_earlier_process, .timeout = 60)
{
	altered(wrong_start, "it started at tick");
}

Test(agent_handshake, nobody_there, .timeout = 60)
{
	altered(nobody_there, "Connection refused");
}

/* Another boot id: as from another host, so TCP and no shared memory. */
static void other_host(struct kvs_record *record)
{
	record->boot_id[0] ^= 1;
}

Test(agent_handshake, from_another_host, .timeout = 60)
{
	struct fleet *fleet = fleet_start_decode(&small);
	other_host((struct kvs_record *)(void *)fleet->records[0]);
	fleet_fill(fleet);
	fleet_join(fleet);
	cr_expect(fleet_transfer(fleet, 0) && fleet_wrong(fleet, 0) == 0);
	cr_expect(fleet_log_count("route=tcp") == 1);
	cr_expect(fleet_log_count("host: no unix socket to pass a descriptor over") > 0);
	fleet_stop(fleet);
}

/* The unix socket is gone (another network namespace): TCP, on the same host. */
static void no_unix(struct kvs_record *record)
{
	record->unix_name[12] ^= 1;
}

Test(agent_handshake, unix_socket_not_reachable, .timeout = 60)
{
	struct fleet *fleet = fleet_start_decode(&small);
	no_unix((struct kvs_record *)(void *)fleet->records[0]);
	fleet_fill(fleet);
	fleet_join(fleet);
	cr_expect(fleet_transfer(fleet, 0) && fleet_wrong(fleet, 0) == 0);
	cr_expect(fleet_log_count("route=tcp") == 1);
	fleet_stop(fleet);
}

Test(agent_handshake, no_transport_in_common, .timeout = 60)
{
	struct kvs_text text;
	fleet_prefill_config.transports = "host";
	fleet_decode_config.transports = "tcp";
	struct fleet *fleet = fleet_start(&small);
	cr_expect(!reaches(fleet, &text) && strstr(text.s, "not among the prefill's") != NULL, "%s", text.s);
	fleet_stop(fleet);
}

/* Layouts that the policy refuses: one warning for each link and side, and the room fails in time. */
Test(agent_handshake, refused_layouts, .timeout = 60)
{
	struct fleet *fleet = fleet_start_decode(&small);
	struct kvs_verdict verdict;
	struct kvs_text text;
	for (int r = 0; r < 2; r++)
		(void)snprintf(fleet->prefill[r]->dtype, sizeof(fleet->prefill[r]->dtype), "float8_e4m3fn");
	fleet_join(fleet);
	for (int i = 0; i < 3; i++) {
		kvs_peer_verdict(fleet->endpoints[0], fleet->peers[0], 0, &verdict);
		cr_expect(verdict.action == KVS_ACT_REFUSE && verdict.refusal == KVS_REFUSE_DTYPE, "%s",
		          verdict.text.s);
	}
	cr_expect(fleet_log_count("kvs_link_judge") == 2, "%u lines", fleet_log_count("kvs_link_judge"));
	uint64_t generation = fleet_open(fleet, 0, 0);
	struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, generation);
	cr_expect(!kvs_pull(&pull, &text));
	uint64_t began = kvs_now_ns();
	while (fleet_state(fleet, 0, 0, &text) != KVS_ROOM_FAILED && kvs_now_ns() - began < 1000000000u)
		usleep(1000);
	cr_expect(fleet_state(fleet, 0, 0, &text) == KVS_ROOM_FAILED && strstr(text.s, "float8_e4m3fn") != NULL, "%s",
	          text.s);
	kvs_peer_verdict(fleet->endpoints[0], fleet->peers[0], 5, &verdict);
	cr_expect(verdict.refusal == KVS_REFUSE_COMPONENTS);
	kvs_peer_verdict(fleet->endpoints[0], 4711, 0, &verdict);
	cr_expect(verdict.action == KVS_ACT_REFUSE && strstr(verdict.text.s, "4711") != NULL);
	fleet_stop(fleet);
}

/* ---- strangers on the socket ---- */

static bool closed_within(int fd, int ms)
{
	char byte[256];
	struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
	while (poll(&poll_fd, 1, ms) == 1) {
		if (recv(fd, byte, sizeof(byte), 0) <= 0)
			return true;
	}
	return false;
}

static int stranger(const struct fleet *fleet, bool tcp)
{
	struct kvs_record record;
	struct kvs_text text = {.s = ""};
	cr_assert(kvs_record_decode(fleet->records[0], fleet->record_sizes[0], &record, &text));
	int fd = tcp ? kvs_connect_tcp(&record, 1000, &text) : kvs_connect_unix(&record, &text);
	cr_assert(fd >= 0, "%s", text.s);
	struct pollfd poll_fd = {.fd = fd, .events = POLLOUT};
	(void)poll(&poll_fd, 1, 1000);
	return fd;
}

Test(agent_handshake, strangers, .timeout = 60)
{
	struct fleet *fleet = fleet_start_decode(&small);
	struct kvs_record record;
	struct kvs_text text;
	uint8_t data[4096];
	uint64_t seed = 1;
	fleet_fill(fleet);
	cr_assert(kvs_record_decode(fleet->records[0], fleet->record_sizes[0], &record, &text));
	for (int tcp = 0; tcp < 2; tcp++) {
		/* Noise. */
		int fd = stranger(fleet, tcp);
		for (size_t i = 0; i < sizeof(data); i++)
			data[i] = (uint8_t)test_random(&seed);
		(void)send(fd, data, sizeof(data), MSG_NOSIGNAL);
		cr_expect(closed_within(fd, 2000));
		close(fd);
		/* Each message in a state where it has no place, with a body of zeros of a likely length. */
		for (uint16_t type = 0; type < 16; type++) {
			struct kvs_wire_header header;
			uint32_t length = type == KVS_MESSAGE_HELLO ? 3 : 100;
			memset(data, 0, sizeof(data));
			kvs_wire_header_init(&header, type, length, record.key);
			memcpy(data, &header, sizeof(header));
			fd = stranger(fleet, tcp);
			(void)send(fd, data, sizeof(header) + length, MSG_NOSIGNAL);
			cr_expect(closed_within(fd, 2000), "type %u", type);
			close(fd);
		}
		/* One that announces more than it may, and one with a version of tomorrow. */
		struct kvs_wire_header header;
		kvs_wire_header_init(&header, KVS_MESSAGE_PULL, UINT32_MAX, record.key);
		fd = stranger(fleet, tcp);
		(void)send(fd, &header, sizeof(header), MSG_NOSIGNAL);
		cr_expect(closed_within(fd, 2000));
		close(fd);
		kvs_wire_header_init(&header, KVS_MESSAGE_HELLO, 44, record.key);
		header.version++;
		fd = stranger(fleet, tcp);
		(void)send(fd, &header, sizeof(header), MSG_NOSIGNAL);
		cr_expect(closed_within(fd, 2000));
		close(fd);
		/* One that says half a word and leaves. */
		kvs_wire_header_init(&header, KVS_MESSAGE_HELLO, 44, record.key);
		fd = stranger(fleet, tcp);
		(void)send(fd, &header, 20, MSG_NOSIGNAL);
		close(fd);
	}
	/* The decode lives and serves. */
	fleet_join(fleet);
	cr_expect(fleet_transfer(fleet, 0) && fleet_wrong(fleet, 0) == 0 && fleet_strayed(fleet) == 0);
	fleet_stop(fleet);
}

/* Who connects and says nothing is turned out when the handshake's time is over. */
Test(agent_handshake, silent_stranger, .timeout = 60)
{
	fleet_decode_config.timeout_ms = 300;
	struct fleet *fleet = fleet_start_decode(&small);
	int fd = stranger(fleet, true);
	cr_expect(!closed_within(fd, 100) && closed_within(fd, 2000));
	close(fd);
	fleet_join(fleet);
	fleet_stop(fleet);
}

Test(agent_handshake, peers_are_counted, .timeout = 60)
{
	struct fleet *fleet = fleet_start(&small);
	struct kvs_text text = {.s = ""};
	uint64_t again = kvs_peer_add(fleet->records[0], fleet->record_sizes[0], &text);
	cr_expect(again == fleet->peers[0]);
	kvs_peer_remove(again);
	cr_expect(reaches(fleet, &text), "one reference is left: %s", text.s);
	kvs_peer_remove(again);
	cr_expect(!reaches(fleet, &text));
	kvs_peer_remove(again);
	cr_expect(kvs_peer_add(fleet->records[0], fleet->record_sizes[0] - 1, &text) == 0 && text.s[0] != '\0');
	cr_expect(kvs_peer_add("KVSPLICE", 8, &text) == 0);
	fleet->peers[0] = kvs_peer_add(fleet->records[0], fleet->record_sizes[0], &text);
	cr_expect(fleet->peers[0] != 0 && reaches(fleet, &text), "%s", text.s);
	fleet_stop(fleet);
}
