/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "staging.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define CACHE_LINE  64
#define RING_SLOTS  16u /* more do not help two cores, and leave the cache */
#define SEALS       (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define HEADER_SIZE 8192u

struct slot_mark {
	_Atomic uint64_t stream;
	_Atomic uint32_t length;
};

struct kvs_staging_header {
	_Alignas(CACHE_LINE) _Atomic uint64_t filled;  /* written by the producer */
	_Alignas(CACHE_LINE) _Atomic uint64_t emptied; /* written by the consumer */
	_Alignas(CACHE_LINE) _Atomic uint32_t consumer_sleeps;
	_Alignas(CACHE_LINE) _Atomic uint32_t producer_sleeps;
	_Alignas(CACHE_LINE) struct slot_mark marks[KVS_SLOT_MAX];
};

_Static_assert(sizeof(struct kvs_staging_header) <= HEADER_SIZE, "the slots begin behind the header");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "atomics that work between processes");

void kvs_staging_init(struct kvs_staging *staging)
{
	memset(staging, 0, sizeof(*staging));
	staging->memory = staging->data = staging->space = -1;
}

void kvs_staging_drop(struct kvs_staging *staging)
{
	if (staging->shared != NULL)
		munmap(staging->shared, staging->mapped);
	if (staging->memory >= 0)
		close(staging->memory);
	if (staging->data >= 0)
		close(staging->data);
	if (staging->space >= 0)
		close(staging->space);
	kvs_staging_init(staging);
}

static bool map(struct kvs_staging *staging)
{
	/* Populated at once: the faults would otherwise come in the middle of the first transfer. */
	void *memory =
	        mmap(NULL, staging->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, staging->memory, 0);
	if (memory == MAP_FAILED)
		return false;
	staging->shared = memory;
	staging->slots = (uint8_t *)memory + HEADER_SIZE;
	return true;
}

bool kvs_staging_create(struct kvs_staging *staging, uint64_t bytes, struct kvs_text *text)
{
	kvs_staging_init(staging);
	staging->slot_size = KVS_SLOT_SIZE;
	staging->slot_count = bytes / KVS_SLOT_SIZE < RING_SLOTS ? (uint32_t)(bytes / KVS_SLOT_SIZE) : RING_SLOTS;
	if (staging->slot_count < 2) {
		staging->slot_count = 2; /* the least that keeps two cores at work */
		staging->slot_size = 64u << 10;
	}
	staging->mapped = HEADER_SIZE + (size_t)staging->slot_count * staging->slot_size;
	staging->memory = memfd_create("kvsplice-staging", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	staging->data = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	staging->space = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (staging->memory < 0 || staging->data < 0 || staging->space < 0 ||
	    ftruncate(staging->memory, (off_t)staging->mapped) != 0 ||
	    fcntl(staging->memory, F_ADD_SEALS, SEALS) != 0 || !map(staging)) {
		kvs_text_set(text, "cannot make %zu bytes of shared staging memory: %m", staging->mapped);
		kvs_staging_drop(staging);
		return false;
	}
	return true;
}

bool kvs_staging_map(struct kvs_staging *staging, const int fds[3], uint32_t slot_count, uint32_t slot_size,
                     struct kvs_text *text)
{
	struct stat st;
	kvs_staging_init(staging);
	staging->memory = fds[0];
	staging->data = fds[1];
	staging->space = fds[2];
	/* Ours to write to without ever waiting, whatever the peer made them. */
	(void)fcntl(staging->data, F_SETFL, O_NONBLOCK);
	(void)fcntl(staging->space, F_SETFL, O_NONBLOCK);
	int seals = fcntl(staging->memory, F_GET_SEALS);
	if (seals < 0 || (seals & SEALS) != SEALS) {
		kvs_text_set(text, "the staging memory of the peer is not sealed (seals 0x%x of 0x%x): not mapped",
		             seals < 0 ? 0U : (unsigned)seals, (unsigned)SEALS);
		goto failed;
	}
	if (slot_count < 1 || slot_count > KVS_SLOT_MAX || slot_size < 4096 || slot_size > (16u << 20) ||
	    fstat(staging->memory, &st) != 0 || (uint64_t)st.st_size < HEADER_SIZE + (uint64_t)slot_count * slot_size) {
		kvs_text_set(text, "the staging memory of the peer does not hold %u slots of %u bytes", slot_count,
		             slot_size);
		goto failed;
	}
	staging->slot_count = slot_count;
	staging->slot_size = slot_size;
	staging->mapped = HEADER_SIZE + (size_t)slot_count * slot_size;
	if (map(staging))
		return true;
	kvs_text_set(text, "cannot map %zu bytes of the peer's staging memory: %m", staging->mapped);
failed:
	kvs_staging_drop(staging);
	return false;
}

enum kvs_slot kvs_staging_filled(struct kvs_staging *staging, const uint8_t **slot_p, uint64_t *stream_p,
                                 uint32_t *length_p)
{
	uint64_t filled = atomic_load_explicit(&staging->shared->filled, memory_order_acquire);
	if (filled == staging->index)
		return KVS_SLOT_NONE;
	uint32_t i = (uint32_t)(staging->index % staging->slot_count);
	const struct slot_mark *mark = &staging->shared->marks[i];
	uint64_t stream = atomic_load_explicit(&mark->stream, memory_order_relaxed);
	uint32_t length = atomic_load_explicit(&mark->length, memory_order_relaxed);
	if (filled - staging->index > staging->slot_count || length == 0 || length > staging->slot_size)
		return KVS_SLOT_INSANE;
	*slot_p = staging->slots + (size_t)i * staging->slot_size;
	*stream_p = stream;
	*length_p = length;
	return KVS_SLOT_READY;
}

void kvs_staging_release(struct kvs_staging *staging)
{
	staging->index++;
	atomic_store(&staging->shared->emptied, staging->index);
	/* The producer's flag is read after our index is seen, the producer's index check comes after its flag is seen:
	 * one of the two notices (both are sequentially consistent). */
	if (atomic_load(&staging->shared->producer_sleeps) != 0 &&
	    atomic_exchange(&staging->shared->producer_sleeps, 0) != 0)
		kvs_event_set(staging->space);
}

bool kvs_staging_arm(struct kvs_staging *staging)
{
	atomic_store(&staging->shared->consumer_sleeps, 1);
	if (atomic_load(&staging->shared->filled) == staging->index)
		return true;
	atomic_store(&staging->shared->consumer_sleeps, 0);
	return false;
}

enum kvs_slot kvs_staging_empty(struct kvs_staging *staging, uint8_t **slot_p)
{
	uint64_t emptied = atomic_load_explicit(&staging->shared->emptied, memory_order_acquire);
	uint64_t used = staging->index - emptied;
	if (used > staging->slot_count)
		return KVS_SLOT_INSANE;
	if (used == staging->slot_count)
		return KVS_SLOT_NONE;
	*slot_p = staging->slots + (staging->index % staging->slot_count) * staging->slot_size;
	return KVS_SLOT_READY;
}

void kvs_staging_commit(struct kvs_staging *staging, uint64_t stream, uint32_t length)
{
	struct slot_mark *mark = &staging->shared->marks[staging->index % staging->slot_count];
	atomic_store_explicit(&mark->stream, stream, memory_order_relaxed);
	atomic_store_explicit(&mark->length, length, memory_order_relaxed);
	staging->index++;
	atomic_store(&staging->shared->filled, staging->index);
	if (atomic_load(&staging->shared->consumer_sleeps) != 0 &&
	    atomic_exchange(&staging->shared->consumer_sleeps, 0) != 0)
		kvs_event_set(staging->data);
}

bool kvs_staging_arm_space(struct kvs_staging *staging)
{
	atomic_store(&staging->shared->producer_sleeps, 1);
	if (staging->index - atomic_load(&staging->shared->emptied) == staging->slot_count)
		return true;
	atomic_store(&staging->shared->producer_sleeps, 0);
	return false;
}

void kvs_event_set(int fd)
{
	uint64_t one = 1;
	ssize_t put;
	do {
		put = write(fd, &one, sizeof(one));
	} while (put < 0 && errno == EINTR);
	/* EAGAIN: the counter is full, so whoever waits is awake already. */
}

void kvs_event_clear(int fd)
{
	uint64_t count;
	ssize_t got;
	do {
		got = read(fd, &count, sizeof(count));
	} while (got < 0 && errno == EINTR);
}
