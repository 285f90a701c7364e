/* SPDX-License-Identifier: Apache-2.0 */
/* A decode rank without the library: what its mooncake registration says of it, and mooncake's engine to reach it. */
#ifndef KVS_CONNECTORS_BARE_H
#define KVS_CONNECTORS_BARE_H

#include "splice.h"

extern const struct kvs_bare_ops kvs_mooncake_bare;

#endif
