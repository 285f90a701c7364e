/* SPDX-License-Identifier: Apache-2.0 */
/* The log's sink: one line, one write, on standard error: "kvsplice[<pid>/<rank>] <level>: <function>: <message>". */
#ifndef KVS_SHIM_LOG_H
#define KVS_SHIM_LOG_H

#include <stddef.h>

/* Start to show messages up to KVSPLICE_LOG. Called when a connector is hooked; until then every message is dropped. */
void kvs_log_install(void);

/* The rank in each line's head, from now on; negative: unknown, shown as "-". Any thread. */
void kvs_log_set_rank(int rank);

/* Put size bytes on the log stream as they are, whatever the level. errno is preserved. Any thread. */
void kvs_log_raw(const char *data, size_t size);

#endif
