/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_PYTHON_AUDIT_BLOCK_H
#define KVS_PYTHON_AUDIT_BLOCK_H

#include "api.h"

/*
 * PySys_AddAuditHook before Py_Initialize, so that the interpreter can free what it allocates there: see the .c file.
 * False: the interpreter did not take the hook.
 */
bool kvs_audit_block_add(kvs_py_audit_t hook);

/* On the event cpython._PySys_ClearAuditHooks: the interpreter is about to free its list of hooks. */
void kvs_audit_block_clearing(void);

#endif
