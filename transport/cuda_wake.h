/* SPDX-License-Identifier: Apache-2.0 */
/* How the agent hears that the GPU has ended a piece: no thread waits for it, and none asks again and again. */
#ifndef KVS_TRANSPORT_CUDA_WAKE_H
#define KVS_TRANSPORT_CUDA_WAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "../policy/text.h"

/* Have the agent's epoll woken by kvs_cuda_wake. Idempotent. The agent, the lock held. False with text. */
bool kvs_cuda_wake_watch(struct kvs_text *text);

/* In a stream, behind a piece: called on a thread of the driver's, which may call nothing of the driver here. */
void kvs_cuda_wake(void *unused);

/* How often it was called. Any thread. */
uint64_t kvs_cuda_wakes(void);

/* In the child of a fork. */
void kvs_cuda_wake_after_fork_in_child(void);

#endif
