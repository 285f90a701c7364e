/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_PYTHON_PATCH_H
#define KVS_PYTHON_PATCH_H

#include <stdatomic.h>

#include "../connectors/connector.h"

/*
 * Replace the methods of the connector's roles in its imported module: each role that fits, wholly; a role with a
 * class, a method or a parameter that is not as expected stays as it was, and one line says so. Sets *done, under the
 * same hold of the interpreter lock as the replacing; where it is set already nothing is done, so two threads may both
 * call this and both find the classes finished when it returns. Interpreter lock held; no exception is left set.
 */
void kvs_patch(struct kvs_connector *connector, KvsPyObject *module, atomic_bool *done);

#endif
