/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transfer infos of rooms that ended while a worker may still hold them: a sender's clear takes its room out of
 * transfer_infos (SGLang common/conn.py, 0.5.12 to 0.5.23), and a call of the worker that names no room could then be
 * taken for one that is not ours. Interpreter lock held; no exception is left set.
 */
#ifndef KVS_CONNECTORS_CLEARED_H
#define KVS_CONNECTORS_CLEARED_H

#include "../python/api.h"

/* Keep the infos of the sender's room, as long as they are among the last few; before the sender's own clear. */
void kvs_cleared_keep(KvsPyObject *sender);

/* The rooms' dictionaries of this manager that are kept, oldest first; new; NULL: none. */
KvsPyObject *kvs_cleared_list(KvsPyObject *manager);

#endif
