/* SPDX-License-Identifier: Apache-2.0 */
#include "itemset.h"

#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
	return (x > y) - (x < y);
}

bool kvs_itemset_init(struct kvs_itemset *set, const int32_t *items, uint32_t count, int32_t *bad_p)
{
	bool sorted = true;
	set->items = NULL;
	set->count = 0;
	*bad_p = 0;
	if (count == 0)
		return true;
	for (uint32_t i = 0; i < count; i++) {
		if (items[i] < 0) {
			*bad_p = items[i];
			return false;
		}
		sorted = sorted && (i == 0 || items[i - 1] <= items[i]);
	}
	set->items = malloc((size_t)count * sizeof(*set->items));
	if (set->items == NULL)
		return false;
	memcpy(set->items, items, (size_t)count * sizeof(*set->items));
	set->count = count;
	if (!sorted)
		qsort(set->items, count, sizeof(*set->items), compare);
	return true;
}

void kvs_itemset_free(struct kvs_itemset *set)
{
	free(set->items);
	set->items = NULL;
	set->count = 0;
}

bool kvs_itemset_holds(const struct kvs_itemset *set, const int32_t *items, uint32_t count, int32_t *missing_p)
{
	uint32_t next = 0; /* where the item after the last one found would be */
	for (uint32_t i = 0; i < count; i++) {
		uint32_t item = (uint32_t)items[i];
		if (items[i] >= 0 && next < set->count && set->items[next] == item) {
			next++;
			continue;
		}
		const uint32_t *found = items[i] < 0 || set->count == 0
		                                ? NULL
		                                : bsearch(&item, set->items, set->count, sizeof(item), compare);
		if (found == NULL) {
			*missing_p = items[i];
			return false;
		}
		next = (uint32_t)(found - set->items) + 1;
	}
	return true;
}
