/* SPDX-License-Identifier: Apache-2.0 */
/* A set of item indexes: what a receiver published for one room and component. */
#ifndef KVS_TRANSPORT_ITEMSET_H
#define KVS_TRANSPORT_ITEMSET_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_itemset {
	uint32_t *items; /* sorted */
	uint32_t count;
};

/* Negative items are refused (false, and *bad_p is one), as is running out of memory (false, *bad_p is 0). */
bool kvs_itemset_init(struct kvs_itemset *set, const int32_t *items, uint32_t count, int32_t *bad_p);
void kvs_itemset_free(struct kvs_itemset *set);

/* Are all of them in the set? If not *missing_p is the first that is not. Fast for lists in the set's own order. */
bool kvs_itemset_holds(const struct kvs_itemset *set, const int32_t *items, uint32_t count, int32_t *missing_p);

#endif
