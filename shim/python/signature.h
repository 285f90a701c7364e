/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_PYTHON_SIGNATURE_H
#define KVS_PYTHON_SIGNATURE_H

#include "../../policy/text.h"
#include "api.h"

/*
 * Does this function take the parameters (names, space-separated) first and in this order, and has every further one a
 * default? A list that ends in "..." takes any further ones. Of several lists, separated by '|', one must fit. A
 * decorated function is judged by what it wraps. Text says what differs (from the last list). Interpreter lock held; no
 * exception is left set.
 */
bool kvs_signature_fits(KvsPyObject *function, const char *parameters, struct kvs_text *text);

/*
 * The position (0-based, "self" included) of the positional parameter of this name; -1: it has none. Interpreter lock
 * held; no exception is left set.
 */
ssize_t kvs_signature_index(KvsPyObject *function, const char *name);

#endif
