/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_PRELOAD_H
#define KVS_PRELOAD_H

/* Register the fork handlers, once; called at the first registration, so that no other process has them. Any thread. */
void kvs_preload_watch_forks(void);

#endif
