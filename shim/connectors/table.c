/* SPDX-License-Identifier: Apache-2.0 */
#include "connector.h"

#define ROW(connector) &(connector),
struct kvs_connector *const kvs_connectors[] = {KVS_CONNECTOR_TABLE(ROW)};
const size_t kvs_connector_count = sizeof kvs_connectors / sizeof *kvs_connectors;

_Static_assert(sizeof kvs_connectors / sizeof *kvs_connectors <= KVS_MAX_CONNECTORS, "raise KVS_MAX_CONNECTORS");
