/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_TRANSPORT_CLOCK_H
#define KVS_TRANSPORT_CLOCK_H

#include <stdint.h>

/* Monotonic nanoseconds. Any thread. */
uint64_t kvs_now_ns(void);

#endif
