/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this process gives the processes that it starts. A server's workers, which are what kvsplice is for, are spawned
 * with the environment of their parent; when that no longer lists this library in LD_PRELOAD nothing else would say so.
 */
#ifndef KVS_PYTHON_LAUNCH_H
#define KVS_PYTHON_LAUNCH_H

#include "api.h"

/* Remember whether this library was listed in LD_PRELOAD; if not, nothing is ever said. From the constructor. */
void kvs_launch_begin(void);

/*
 * An audited event, with its arguments and sys.modules (which must live as long as the process). When it takes this
 * library out of what children get, one warning a process says so, if a package with connectors has been imported; no
 * other process hears of it. First interpreter, interpreter lock held, no exception set; none is left set.
 */
void kvs_launch_event(const char *event, KvsPyObject *args, KvsPyObject *modules);

/* More modules have been imported since the last event: a package with connectors may be among them. As above. */
void kvs_launch_look_again(KvsPyObject *modules);

#endif
