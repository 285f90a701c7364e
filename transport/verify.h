/* SPDX-License-Identifier: Apache-2.0 */
/* KVSPLICE_VERIFY: a digest of what a plan moves, of its sources by the prefill and of its destinations by the decode.
 */
#ifndef KVS_TRANSPORT_VERIFY_H
#define KVS_TRANSPORT_VERIFY_H

#include "copy.h"
#include "cuda_memory.h"

/*
 * 64 bits of the plan's bytes on one side, in canonical order. Finds what is wrong by accident: lost, swapped or
 * changed bytes; it is no signature. memory: the GPU memory that the side is in, whose bytes are brought to the CPU
 * piece by piece by the copy kernel; NULL: it is host memory. False with text: the driver's error, or no memory. Any
 * thread; waits for the GPU.
 */
bool kvs_verify_digest(const struct kvs_plan *plan, enum kvs_side side, struct kvs_cuda_memory *memory,
                       uint64_t *digest_p, struct kvs_text *text);

#endif
