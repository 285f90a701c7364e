/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An audit hook that is added before Py_Initialize is kept in a block of the raw allocator of that moment. Options that
 * are read later (-X dev, PYTHONMALLOC=debug) put another raw allocator in its place, and at exit the block is handed
 * to that one, which aborts: the block is none of its own. So we learn the block's address when it is made, and when
 * the interpreter is about to free it, stand in front of the raw allocator until that one block has gone back where it
 * came from. The block is all that we touch, and where the allocator is still the same we do nothing at all.
 */
#include "audit_block.h"

#include <stddef.h>

#define RAW_DOMAIN 0 /* PYMEM_DOMAIN_RAW */

static struct kvs_py_allocator maker;   /* the raw allocator when the hook was added */
static struct kvs_py_allocator current; /* the one in use when the hooks are cleared */
static void *block;

static void *malloc_and_note(void *context, size_t size)
{
	block = maker.malloc(context, size);
	return block;
}

static void free_by_maker(void *context, void *memory)
{
	if (memory != block || !block) {
		current.free(context, memory);
		return;
	}
	block = NULL;
	maker.free(maker.context, memory);
	kvs_py.PyMem_SetAllocator(RAW_DOMAIN, &current);
}

bool kvs_audit_block_add(kvs_py_audit_t hook)
{
	kvs_py.PyMem_GetAllocator(RAW_DOMAIN, &maker);
	struct kvs_py_allocator noting = maker;
	noting.malloc = malloc_and_note;
	kvs_py.PyMem_SetAllocator(RAW_DOMAIN, &noting);
	int failed = kvs_py.PySys_AddAuditHook(hook, NULL);
	kvs_py.PyMem_SetAllocator(RAW_DOMAIN, &maker);
	return !failed;
}

void kvs_audit_block_clearing(void)
{
	if (!block)
		return;
	struct kvs_py_allocator now;
	kvs_py.PyMem_GetAllocator(RAW_DOMAIN, &now);
	if (now.free == free_by_maker)
		return; /* standing there already */
	current = now;
	if (current.free == maker.free && current.context == maker.context)
		return;
	struct kvs_py_allocator standing = current;
	standing.free = free_by_maker;
	kvs_py.PyMem_SetAllocator(RAW_DOMAIN, &standing);
}
