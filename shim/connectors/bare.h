/* SPDX-License-Identifier: Apache-2.0 */
/* Decode ranks without the library: what their registrations say of them, and the connectors' engines to reach them. */
#ifndef KVS_CONNECTORS_BARE_H
#define KVS_CONNECTORS_BARE_H

#include "splice.h"

extern const struct kvs_bare_ops kvs_mooncake_bare;
extern const struct kvs_bare_ops kvs_nixl_bare;

/*
 * The layout of a decode rank from its registration info, for connectors that register plain addresses; NULL with text:
 * its release does not say enough. The caller owns it.
 */
struct kvs_layout *kvs_bare_describe(const struct kvs_layout *own, KvsPyObject *info, struct kvs_text *text);

#endif
