/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_PYTHON_HOOK_H
#define KVS_PYTHON_HOOK_H

/*
 * Watch this interpreter's imports for the modules of kvs_connectors and patch their classes. To be called once, before
 * the interpreter starts, with kvs_py loaded. Silent.
 */
void kvs_hook_install(void);

#endif
