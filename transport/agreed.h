/* SPDX-License-Identifier: Apache-2.0 */
/* Do the prefill ranks that a decode rank is served by run the library? */
#ifndef KVS_TRANSPORT_AGREED_H
#define KVS_TRANSPORT_AGREED_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Has an agent of every rank that serves this decode endpoint, in a prefill of so many attention-TP ranks, come through
 * the handshake and compared layouts, with its connection still up? False as well for an unknown endpoint and for sizes
 * of which neither is a multiple of the other. Two prefills of one TP size are not told apart. Any thread; does not
 * wait.
 */
bool kvs_endpoint_agreed(uint64_t endpoint, uint32_t prefill_tp_size);

#endif
