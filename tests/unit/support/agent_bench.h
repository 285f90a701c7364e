/* SPDX-License-Identifier: Apache-2.0 */
/* Requests over a transport that are timed; KVS_BENCH names what is measured, without it a case is skipped. */
#ifndef KVS_TEST_AGENT_BENCH_H
#define KVS_TEST_AGENT_BENCH_H

#include "agent_fleet.h"

void bench_need(const char *what, const char *transport, uint32_t timeout_ms);

/* Payload of a request, all ranks together. */
uint64_t bench_bytes(const struct fleet_shape *shape);

/* The first pairs of a request's ranks at once, from the first to begin to the last to end. Seconds. */
double bench_request(struct fleet *fleet, uint32_t pairs);

/* Check the bytes of the last request and end the fleet. */
void bench_end(struct fleet *fleet, const char *what);

#endif
