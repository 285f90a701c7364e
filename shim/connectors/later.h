/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls for a caller that must not wait: a thread for each, and a status object to ask. */
#ifndef KVS_CONNECTORS_LATER_H
#define KVS_CONNECTORS_LATER_H

#include "../../transport/agent.h"
#include "../python/api.h"

/*
 * Start the pull, judged first, and return an object with mori's TransferStatus methods (InProgress, Succeeded, Failed,
 * Message, Wait), new. The pull's lists and the component's name, which is for the log, are copied. NULL, with no
 * exception left set and text: no memory, or no thread. Interpreter lock held.
 */
KvsPyObject *kvs_later_start(const struct kvs_pull *pull, const char *component, struct kvs_text *text);

#endif
