/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transports for tests, plugged into the row of a name that this build cannot do otherwise: the host transport with a
 * fault. Both processes must plug in the same one: fleet_child_setup for the decode's.
 */
#ifndef KVS_TEST_AGENT_FAULTS_H
#define KVS_TEST_AGENT_FAULTS_H

#include <stdatomic.h>

#include "transport/link.h"

#define FAULT_ORDER "rdma,host,tcp"

/* Each piece takes five milliseconds at the decode. */
void fault_slow(void);
/* The decode's side fails after three pieces. */
void fault_pull(void);
/* The prefill's side fails after half of the bytes. */
void fault_send(void);
/* Every transport fails. */
void fault_all(void);
/* The prefill writes a senseless index into the shared memory. */
void fault_insane(void);
/* The prefill sends nothing and waits until it is stopped. */
void fault_silent(void);
/* On the host transport itself, at the prefill alone: while it is set, a byte of the first piece is changed in the
 * shared memory. */
extern atomic_bool fault_changes_byte;
void fault_change(void);

#endif
