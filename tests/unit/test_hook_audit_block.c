/* SPDX-License-Identifier: Apache-2.0 */
/* The block of an audit hook goes back to the allocator that made it, with allocators in place of CPython's. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "shim/python/audit_block.h"

/* An allocator that knows its blocks: a stranger's block is what makes CPython abort. */
struct arena {
	void *blocks[8];
	int strangers;
	int freed;
};

static void *arena_malloc(void *context, size_t size)
{
	struct arena *arena = context;
	for (int i = 0; i < 8; i++)
		if (!arena->blocks[i])
			return arena->blocks[i] = malloc(size);
	return NULL;
}

static void *arena_calloc(void *context, size_t count, size_t size)
{
	(void)context;
	(void)count;
	(void)size;
	return NULL;
}

static void *arena_realloc(void *context, void *block, size_t size)
{
	(void)context;
	(void)block;
	(void)size;
	return NULL;
}

static void arena_free(void *context, void *block)
{
	struct arena *arena = context;
	if (!block)
		return;
	for (int i = 0; i < 8; i++) {
		if (arena->blocks[i] != block)
			continue;
		arena->blocks[i] = NULL;
		arena->freed++;
		free(block);
		return;
	}
	arena->strangers++;
}

static struct arena first, debug;
static struct kvs_py_allocator raw;
static void *entry;
static bool refuse;

static struct kvs_py_allocator of(struct arena *arena)
{
	return (struct kvs_py_allocator){arena, arena_malloc, arena_calloc, arena_realloc, arena_free};
}

static void get_allocator(int domain, struct kvs_py_allocator *allocator)
{
	cr_assert_eq(domain, 0);
	*allocator = raw;
}

static void set_allocator(int domain, struct kvs_py_allocator *allocator)
{
	cr_assert_eq(domain, 0);
	raw = *allocator;
}

static int add_audit_hook(kvs_py_audit_t hook, void *user)
{
	(void)hook;
	(void)user;
	if (refuse)
		return -1;
	entry = raw.malloc(raw.context, 32);
	return entry ? 0 : -1;
}

static int hook(const char *event, KvsPyObject *args, void *user)
{
	(void)event;
	(void)args;
	(void)user;
	return 0;
}

static bool same(struct kvs_py_allocator a, struct kvs_py_allocator b)
{
	return a.context == b.context && a.malloc == b.malloc && a.free == b.free && a.calloc == b.calloc &&
	       a.realloc == b.realloc;
}

static void set_up(void)
{
	kvs_py.PyMem_GetAllocator = get_allocator;
	kvs_py.PyMem_SetAllocator = set_allocator;
	kvs_py.PySys_AddAuditHook = add_audit_hook;
	raw = of(&first);
}

TestSuite(hook_audit_block, .init = set_up);

static void check_clean(void)
{
	cr_assert_eq(first.strangers, 0);
	cr_assert_eq(debug.strangers, 0);
	for (int i = 0; i < 8; i++)
		cr_assert(!first.blocks[i] && !debug.blocks[i]);
}

Test(hook_audit_block, same_allocator)
{
	cr_assert(kvs_audit_block_add(hook));
	cr_assert(same(raw, of(&first)), "the allocator is as before");
	kvs_audit_block_clearing();
	cr_assert(same(raw, of(&first)), "nothing to do");
	raw.free(raw.context, entry);
	cr_assert_eq(first.freed, 1);
	check_clean();
}

Test(hook_audit_block, another_allocator)
{
	cr_assert(kvs_audit_block_add(hook));
	raw = of(&debug);
	kvs_audit_block_clearing();
	void *other = raw.malloc(raw.context, 8);
	raw.free(raw.context, other);
	raw.free(raw.context, NULL);
	cr_assert_eq(debug.freed, 1, "other blocks go to the allocator in use");
	raw.free(raw.context, entry);
	cr_assert_eq(first.freed, 1);
	cr_assert(same(raw, of(&debug)), "and the allocator in use is back");
	check_clean();
	kvs_audit_block_clearing();
	cr_assert(same(raw, of(&debug)), "a second clearing finds nothing");
}

Test(hook_audit_block, cleared_once_per_hook)
{
	/* The event comes once for each hook in the list before any is freed. */
	cr_assert(kvs_audit_block_add(hook));
	raw = of(&debug);
	kvs_audit_block_clearing();
	kvs_audit_block_clearing();
	kvs_audit_block_clearing();
	raw.free(raw.context, entry);
	cr_assert_eq(first.freed, 1);
	check_clean();
}

Test(hook_audit_block, never_cleared)
{
	cr_assert(kvs_audit_block_add(hook));
	raw = of(&debug);
	void *other = raw.malloc(raw.context, 8);
	raw.free(raw.context, other);
	cr_assert(same(raw, of(&debug)));
	free(entry);
}

Test(hook_audit_block, refused)
{
	refuse = true;
	cr_assert_not(kvs_audit_block_add(hook));
	cr_assert(same(raw, of(&first)));
	raw = of(&debug);
	kvs_audit_block_clearing();
	cr_assert(same(raw, of(&debug)), "there is no block of ours");
}
