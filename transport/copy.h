/* SPDX-License-Identifier: Apache-2.0 */
/* Between the strided places of a plan and a linear buffer that holds a piece of its canonical byte stream. */
#ifndef KVS_TRANSPORT_COPY_H
#define KVS_TRANSPORT_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "../policy/plan.h"

/* Where the next piece begins. Zeroed: at the start of the stream. The plan must outlive it. */
struct kvs_cursor {
	uint32_t copy;
	uint32_t pair;
	uint64_t block;
	uint64_t offset; /* within the block */
};

/* Gather the next size bytes of the stream from the plan's sources; returns how many there were. One thread each. */
size_t kvs_copy_pack(const struct kvs_plan *plan, struct kvs_cursor *cursor, void *linear_p, size_t size);

/* Scatter the next size bytes of the stream to the plan's destinations; returns how many it took. One thread each. */
size_t kvs_copy_unpack(const struct kvs_plan *plan, struct kvs_cursor *cursor, const void *linear, size_t size);

enum kvs_side {
	KVS_SIDE_SOURCE,
	KVS_SIDE_DESTINATION,
};

/* Bytes at the cursor that lie side by side on one side, within one item; 0 at the end of the stream. Pure. */
uint64_t kvs_copy_run(const struct kvs_plan *plan, const struct kvs_cursor *cursor, enum kvs_side side);

/*
 * Where the next size bytes of the stream lie on one side, neighbours as one: at most so many places, so they may hold
 * fewer bytes. Returns how many places; the cursor stays. Pure.
 */
uint32_t kvs_copy_runs(const struct kvs_plan *plan, const struct kvs_cursor *cursor, enum kvs_side side, size_t size,
                       struct iovec *runs_p, uint32_t most);

/* The next size bytes of the stream were moved by other means. */
void kvs_copy_skip(const struct kvs_plan *plan, struct kvs_cursor *cursor, uint64_t size);

/*
 * Does every byte of the plan's side lie inside the tensors registered in this process? The plan was built from checked
 * lists; this is the last word before memory is touched, on the plan itself, in arithmetic that cannot wrap. Pure.
 */
bool kvs_copy_guard(const struct kvs_plan *plan, enum kvs_side side, const struct kvs_layout *layout,
                    uint32_t component, struct kvs_text *text);

#endif
