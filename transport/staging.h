/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared staging: a ring of slots in a memfd, between one prefill and one decode. The decode makes it and seals its
 * size, the prefill fills slots, the decode empties them. Each side keeps its own index and believes the other's only
 * after checking a copy of it. Each slot names the stream it belongs to, so that what an ended pull left in the ring is
 * skipped, and the ring is never reset.
 *
 * The consumer's functions are for the decode's agent thread, the producer's for the one worker that has the link's
 * stream. Both spin shortly, then sleep on an eventfd.
 */
#ifndef KVS_TRANSPORT_STAGING_H
#define KVS_TRANSPORT_STAGING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../policy/text.h"

#define KVS_SLOT_SIZE (128u << 10)
#define KVS_SLOT_MAX  64u

struct kvs_staging_header; /* in the shared memory */

struct kvs_staging {
	struct kvs_staging_header *shared; /* NULL: none */
	uint8_t *slots;
	size_t mapped;
	uint32_t slot_count;
	uint32_t slot_size;
	uint64_t index; /* ours: slots filled, or slots emptied */
	int memory;     /* descriptors; -1: none */
	int data;       /* eventfd: a slot was filled */
	int space;      /* eventfd: a slot was emptied */
};

/* No staging yet. */
void kvs_staging_init(struct kvs_staging *staging);

/* Decode: make a ring of at most bytes. False with text, and nothing is left. */
bool kvs_staging_create(struct kvs_staging *staging, uint64_t bytes, struct kvs_text *text);

/*
 * Prefill: map the ring that a peer made; takes over the three descriptors in any case. False with text: not sealed,
 * too small, senseless numbers, or the system's error.
 */
bool kvs_staging_map(struct kvs_staging *staging, const int fds[3], uint32_t slot_count, uint32_t slot_size,
                     struct kvs_text *text);

/* Unmap and close. Idempotent. */
void kvs_staging_drop(struct kvs_staging *staging);

enum kvs_slot {
	KVS_SLOT_NONE,
	KVS_SLOT_READY,
	KVS_SLOT_INSANE, /* the other side's index makes no sense: fail the link */
};

/* Consumer: the next filled slot, its stream and length (checked against slot_size), or none. */
enum kvs_slot kvs_staging_filled(struct kvs_staging *staging, const uint8_t **slot_p, uint64_t *stream_p,
                                 uint32_t *length_p);
/* Consumer: that slot is empty again. */
void kvs_staging_release(struct kvs_staging *staging);
/* Consumer: about to sleep until the data eventfd fires. False: something is there already, do not. */
bool kvs_staging_arm(struct kvs_staging *staging);

/* Producer: an empty slot, or none. */
enum kvs_slot kvs_staging_empty(struct kvs_staging *staging, uint8_t **slot_p);
/* Producer: it is filled. */
void kvs_staging_commit(struct kvs_staging *staging, uint64_t stream, uint32_t length);
/* Producer: as kvs_staging_arm, for the space eventfd. */
bool kvs_staging_arm_space(struct kvs_staging *staging);

/* Set an eventfd, or clear it. */
void kvs_event_set(int fd);
void kvs_event_clear(int fd);

/* A few nanoseconds of nothing, kind to the other thread of the core. */
static inline void kvs_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

#endif
