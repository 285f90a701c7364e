/* SPDX-License-Identifier: Apache-2.0 */
/* Shared staging: what is mapped, what is believed, and who is woken. */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "transport/staging.h"

static void duplicate(const struct kvs_staging *staging, int fds[3])
{
	fds[0] = dup(staging->memory);
	fds[1] = dup(staging->data);
	fds[2] = dup(staging->space);
}

static void pair(struct kvs_staging *consumer, struct kvs_staging *producer, uint64_t bytes)
{
	struct kvs_text text = {.s = ""};
	int fds[3];
	cr_assert(kvs_staging_create(consumer, bytes, &text), "%s", text.s);
	duplicate(consumer, fds);
	cr_assert(kvs_staging_map(producer, fds, consumer->slot_count, consumer->slot_size, &text), "%s", text.s);
}

Test(transport_staging, size_is_sealed)
{
	struct kvs_staging staging;
	cr_assert(kvs_staging_create(&staging, 64u << 20, NULL));
	int seals = fcntl(staging.memory, F_GET_SEALS);
	cr_expect((seals & F_SEAL_SHRINK) != 0 && (seals & F_SEAL_GROW) != 0 && (seals & F_SEAL_SEAL) != 0);
	cr_expect(ftruncate(staging.memory, 0) != 0 && errno == EPERM);
	cr_expect((fcntl(staging.memory, F_GETFD) & FD_CLOEXEC) != 0);
	kvs_staging_drop(&staging);
}

Test(transport_staging, stays_within_what_is_allowed)
{
	struct kvs_staging staging;
	static const uint64_t allowed[] = {0, 1u << 20, 3u << 20, 64u << 20, UINT64_MAX};
	for (size_t i = 0; i < 5; i++) {
		cr_assert(kvs_staging_create(&staging, allowed[i], NULL));
		uint64_t slots = (uint64_t)staging.slot_count * staging.slot_size;
		cr_expect(staging.slot_count >= 2 && (allowed[i] == 0 || slots <= allowed[i]));
		kvs_staging_drop(&staging);
	}
}

Test(transport_staging, unsealed_or_small_is_not_mapped)
{
	struct kvs_staging made, mapped;
	struct kvs_text text = {.s = ""};
	int fds[3];
	cr_assert(kvs_staging_create(&made, 1u << 20, NULL));
	duplicate(&made, fds);
	close(fds[0]);
	fds[0] = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	cr_assert(ftruncate(fds[0], 64 << 20) == 0);
	cr_expect(!kvs_staging_map(&mapped, fds, 2, 65536, &text) && strstr(text.s, "not sealed") != NULL);
	cr_expect(mapped.shared == NULL && fcntl(fds[0], F_GETFD) == -1, "the descriptors are closed");
	static const uint32_t bad[][2] = {{0, 65536}, {65, 65536}, {2, 0}, {64, 16u << 20}, {2, UINT32_MAX}};
	for (size_t i = 0; i < 5; i++) {
		duplicate(&made, fds);
		cr_expect(!kvs_staging_map(&mapped, fds, bad[i][0], bad[i][1], &text), "%zu", i);
	}
	/* Not a memfd at all. */
	for (int i = 0; i < 3; i++)
		fds[i] = eventfd(0, 0);
	cr_expect(!kvs_staging_map(&mapped, fds, 2, 65536, &text));
	kvs_staging_drop(&made);
}

Test(transport_staging, slots_in_order)
{
	struct kvs_staging consumer, producer;
	uint8_t *slot;
	const uint8_t *full;
	uint64_t stream;
	uint32_t length;
	pair(&consumer, &producer, 1u << 20);
	for (uint32_t i = 0; i < 1000; i++) {
		cr_assert(kvs_staging_empty(&producer, &slot) == KVS_SLOT_READY);
		slot[i] = (uint8_t)i;
		kvs_staging_commit(&producer, i, i + 1);
		cr_assert(kvs_staging_filled(&consumer, &full, &stream, &length) == KVS_SLOT_READY);
		cr_expect(stream == i && length == i + 1 && full[i] == (uint8_t)i);
		kvs_staging_release(&consumer);
	}
	cr_expect(kvs_staging_filled(&consumer, &full, &stream, &length) == KVS_SLOT_NONE);
	for (uint32_t i = 0; i < consumer.slot_count; i++) {
		cr_assert(kvs_staging_empty(&producer, &slot) == KVS_SLOT_READY);
		kvs_staging_commit(&producer, 1, 1);
	}
	cr_expect(kvs_staging_empty(&producer, &slot) == KVS_SLOT_NONE);
	kvs_staging_drop(&consumer);
	kvs_staging_drop(&producer);
}

static bool fires(int fd)
{
	struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
	return poll(&poll_fd, 1, 0) == 1;
}

Test(transport_staging, sleepers_are_woken)
{
	struct kvs_staging consumer, producer;
	uint8_t *slot;
	pair(&consumer, &producer, 1u << 20);
	cr_expect(kvs_staging_arm(&consumer));
	cr_assert(kvs_staging_empty(&producer, &slot) == KVS_SLOT_READY);
	kvs_staging_commit(&producer, 1, 1);
	cr_expect(fires(consumer.data));
	kvs_event_clear(consumer.data);
	cr_expect(!kvs_staging_arm(&consumer), "there is a slot already");
	kvs_staging_commit(&producer, 1, 1);
	cr_expect(!fires(consumer.data), "nobody sleeps");
	while (kvs_staging_empty(&producer, &slot) == KVS_SLOT_READY)
		kvs_staging_commit(&producer, 1, 1);
	cr_expect(kvs_staging_arm_space(&producer));
	kvs_staging_release(&consumer);
	cr_expect(fires(producer.space));
	cr_expect(!kvs_staging_arm_space(&producer));
	kvs_staging_drop(&consumer);
	kvs_staging_drop(&producer);
}

/* The first two cache lines of the shared memory are the indexes: what a broken or hostile peer may write there. */
Test(transport_staging, senseless_indexes)
{
	struct kvs_staging consumer, producer;
	uint8_t *slot;
	const uint8_t *full;
	uint64_t stream;
	uint32_t length;
	static const uint64_t bad[] = {17, 1000, UINT64_MAX - 100, UINT64_MAX / 2};
	pair(&consumer, &producer, 64u << 20);
	_Atomic uint64_t *filled = (_Atomic uint64_t *)(void *)producer.shared;
	_Atomic uint64_t *emptied = (_Atomic uint64_t *)(void *)((char *)producer.shared + 64);
	for (size_t i = 0; i < 4; i++) {
		atomic_store(filled, bad[i]);
		cr_expect(kvs_staging_filled(&consumer, &full, &stream, &length) == KVS_SLOT_INSANE, "%zu", i);
		atomic_store(emptied, bad[i]);
		cr_expect(kvs_staging_empty(&producer, &slot) == KVS_SLOT_INSANE, "%zu", i);
	}
	/* A sane index and a senseless length. */
	atomic_store(filled, 0);
	atomic_store(emptied, 0);
	static const uint32_t lengths[] = {0, KVS_SLOT_SIZE + 1, UINT32_MAX};
	for (size_t i = 0; i < 3; i++) {
		producer.index = 0;
		kvs_staging_commit(&producer, 1, lengths[i]);
		cr_expect(kvs_staging_filled(&consumer, &full, &stream, &length) == KVS_SLOT_INSANE, "%zu", i);
	}
	kvs_staging_drop(&consumer);
	kvs_staging_drop(&producer);
}
