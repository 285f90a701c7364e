/* SPDX-License-Identifier: Apache-2.0 */
/* The endpoint record: what it says, and everything that is not one. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "support/random.h"
#include "transport/record.h"
#include "transport/sock.h"

static struct kvs_record make(void)
{
	struct kvs_identity self;
	struct kvs_record record;
	kvs_identity_self(&self);
	kvs_record_init(&record, &self);
	record.endpoint = 7;
	memcpy(record.unix_name, "name", 5);
	record.tcp_family = 4;
	record.tcp_port = 4567;
	memcpy(record.tcp_address, "\x7f\x00\x00\x01", 4);
	return record;
}

Test(transport_record, round_trip)
{
	struct kvs_record record = make(), decoded;
	struct kvs_text text = {.s = ""};
	char name[128];
	cr_assert(kvs_record_is(&record, sizeof(record)));
	cr_assert(kvs_record_decode(&record, sizeof(record), &decoded, &text), "%s", text.s);
	cr_expect(memcmp(&record, &decoded, sizeof(record)) == 0);
	cr_expect(decoded.pid == (uint32_t)getpid() && decoded.start_time != 0 && decoded.pid_namespace != 0);
	kvs_record_name(&decoded, name, sizeof(name));
	cr_expect(strstr(name, "127.0.0.1:4567") != NULL, "%s", name);
}

/* A later version adds fields at the end; it says so in its size, and we read what we know. */
Test(transport_record, longer_of_a_later_version)
{
	uint8_t data[KVS_RECORD_MAX] = {0};
	struct kvs_record record = make(), decoded;
	struct kvs_text text;
	record.minor = 9;
	record.size = sizeof(record) + 40;
	memcpy(data, &record, sizeof(record));
	cr_expect(kvs_record_decode(data, sizeof(record) + 40, &decoded, &text), "%s", text.s);
	cr_expect(decoded.minor == 9 && decoded.endpoint == 7);
	cr_expect(!kvs_record_decode(data, sizeof(record) + 39, &decoded, &text));
	record.size = KVS_RECORD_MAX + 1;
	memcpy(data, &record, sizeof(record));
	cr_expect(!kvs_record_decode(data, sizeof(data), &decoded, &text));
}

Test(transport_record, every_truncation)
{
	struct kvs_record record = make(), decoded;
	struct kvs_text text;
	for (size_t size = 0; size < sizeof(record); size++) {
		/* An allocation of the exact size: a sanitizer build sees a byte too many. */
		uint8_t *data = malloc(size + 1);
		memcpy(data, &record, size);
		cr_expect(!kvs_record_decode(data, size, &decoded, &text), "%zu bytes", size);
		cr_expect(text.s[0] != '\0');
		free(data);
	}
	cr_expect(!kvs_record_is(NULL, 0));
}

Test(transport_record, malformed)
{
	struct kvs_record decoded, r;
	struct kvs_text text;
	r = make();
	r.major = 2;
	cr_expect(kvs_record_is(&r, sizeof(r)));
	cr_expect(!kvs_record_decode(&r, sizeof(r), &decoded, &text) && strstr(text.s, "version 2") != NULL);
	r = make();
	r.endpoint = 0;
	cr_expect(!kvs_record_decode(&r, sizeof(r), &decoded, &text));
	r = make();
	memset(r.unix_name, 'x', sizeof(r.unix_name));
	cr_expect(!kvs_record_decode(&r, sizeof(r), &decoded, &text));
	r = make();
	r.tcp_family = 5;
	cr_expect(!kvs_record_decode(&r, sizeof(r), &decoded, &text));
	r = make();
	r.tcp_port = 0;
	r.unix_name[0] = '\0';
	cr_expect(!kvs_record_decode(&r, sizeof(r), &decoded, &text));
	r = make();
	r.magic[7] ^= 1;
	cr_expect(!kvs_record_is(&r, sizeof(r)) && !kvs_record_decode(&r, sizeof(r), &decoded, &text));
	/* Senseless by chance: never a crash, and a reason whenever it is not taken. */
	uint64_t seed = 1;
	for (int i = 0; i < 100000; i++) {
		r = make();
		((uint8_t *)&r)[test_random(&seed) % sizeof(r)] = (uint8_t)test_random(&seed);
		text.s[0] = '\0';
		cr_expect(kvs_record_decode(&r, sizeof(r), &decoded, &text) || text.s[0] != '\0');
	}
}

Test(transport_record, listen_values)
{
	struct kvs_listen listen;
	struct kvs_text text;
	static const char *const good[] = {"127.0.0.1", "127.0.0.1:5000", "0.0.0.0:5000-5010",
	                                   "::1",       "[::1]",          "[::1]:80-81"};
	static const char *const bad[] = {"",     ":80",     "1.2.3.4:0",   "1.2.3.4:9-8", "1.2.3.4:70000",
	                                  "[::1", "[::1]80", "1.2.3.4:80-", "1.2.3.4:x",   "1.2.3.4:1-2-3"};
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		cr_expect(kvs_listen_parse(good[i], &listen, &text), "%s: %s", good[i], text.s);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		cr_expect(!kvs_listen_parse(bad[i], &listen, &text), "%s", bad[i]);
	cr_assert(kvs_listen_parse("[::1]:80-81", &listen, &text));
	cr_expect(listen.first == 80 && listen.last == 81 && listen.address.sa.sa_family == AF_INET6);
}

Test(transport_record, next_free_port)
{
	struct kvs_listen listen;
	struct kvs_record a, b, c;
	struct kvs_text text;
	int first = -1, second = -1, port = 21469;
	/* Below the ports that the kernel gives out; the next two where somebody listens all the same. */
	for (int i = 0; i < 50 && second < 0; i++) {
		char value[64];
		if (first >= 0)
			close(first);
		port += 2;
		(void)snprintf(value, sizeof(value), "127.0.0.1:%d-%d", port, port + 1);
		cr_assert(kvs_listen_parse(value, &listen, &text));
		first = kvs_listen_tcp(&listen, &a, &text);
		second = first < 0 ? -1 : kvs_listen_tcp(&listen, &b, &text);
	}
	cr_assert(first >= 0 && second >= 0, "%s", text.s);
	cr_expect(a.tcp_port == port && b.tcp_port == port + 1 && a.tcp_family == 4);
	cr_expect(kvs_listen_tcp(&listen, &c, &text) == -1 && strstr(text.s, "KVSPLICE_LISTEN") != NULL);
	close(first);
	close(second);
	cr_assert(kvs_listen_parse("192.0.2.1", &listen, &text));
	cr_expect(kvs_listen_tcp(&listen, &c, &text) == -1 && strstr(text.s, "192.0.2.1") != NULL, "%s", text.s);
}
