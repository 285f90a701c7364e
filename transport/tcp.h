/* SPDX-License-Identifier: Apache-2.0 */
/* What tests and measurements of the tcp transport may set. */
#ifndef KVS_TRANSPORT_TCP_H
#define KVS_TRANSPORT_TCP_H

#include <stdint.h>

/*
 * Runs of host memory at least this many bytes long are sent from where they lie and received into where they belong;
 * shorter ones are copied once more (docs/performance.md). Not to be changed while a stream is under way.
 */
extern uint64_t kvs_tcp_direct_min;

#endif
