/* SPDX-License-Identifier: Apache-2.0 */
#include "connector.h"

#define ROW(connector) &(connector),
#define ONE(connector) +1
struct kvs_connector *const kvs_connectors[] = {KVS_CONNECTOR_TABLE(ROW)};
const size_t kvs_connector_count = KVS_CONNECTOR_TABLE(ONE);

_Static_assert(KVS_CONNECTOR_TABLE(ONE) <= KVS_MAX_CONNECTORS, "raise KVS_MAX_CONNECTORS");
