/* SPDX-License-Identifier: Apache-2.0 */
/* KVSPLICE_VERIFY: a digest of what a plan moves, of its sources by the prefill and of its destinations by the decode.
 */
#ifndef KVS_TRANSPORT_VERIFY_H
#define KVS_TRANSPORT_VERIFY_H

#include "copy.h"

/*
 * 64 bits of the plan's bytes on one side, in canonical order. Finds what is wrong by accident: lost, swapped or
 * changed bytes; it is no signature. The memory must be readable by the CPU. Any thread.
 */
uint64_t kvs_verify_digest(const struct kvs_plan *plan, enum kvs_side side);

#endif
