/* SPDX-License-Identifier: Apache-2.0 */
#include "state.h"

#include <stddef.h>
#include <string.h>

static const struct kvs_state_row rows[] = {
#define X(name, sharding, unit, index_rule) {name, sharding, unit, index_rule},
        KVS_STATE_TABLE(X)
#undef X
};

const struct kvs_state_row *kvs_state_find(const char *type)
{
	size_t i;

	if (!type)
		return NULL;
	for (i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
		if (!strcmp(rows[i].name, type))
			return &rows[i];
	return NULL;
}
