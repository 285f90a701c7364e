/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_TRANSPORT_MEMORY_H
#define KVS_TRANSPORT_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Is this an address of GPU memory? Asks the CUDA driver where the process has loaded it already, and never loads it: a
 * process without it has no such memory. Any thread.
 */
bool kvs_memory_is_device(uint64_t address);

#endif
