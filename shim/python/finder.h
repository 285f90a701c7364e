/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_PYTHON_FINDER_H
#define KVS_PYTHON_FINDER_H

#include "api.h"

/*
 * While entered, the modules that are wanted are reported as soon as their code has run, when the interpreter still has
 * them locked and marked as unfinished: no other thread can have used them. Without it a thread that waits for the same
 * import may go on before the importing thread is back in our hands.
 */
struct kvs_finder {
	/* Is this thread importing the module of this name (a str) from the hook? */
	bool (*wanted)(KvsPyObject *name);
	/* Its code has run. No exception may be left set. */
	void (*loaded)(KvsPyObject *module);
};

/* Interpreter lock held, no exception left set. The structure must live as long as the process. False: not entered. */
bool kvs_finder_enter(const struct kvs_finder *finder);

/* To be called with or without an exception set, which stays. */
void kvs_finder_leave(void);

#endif
