/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "verbs.h"

#include <dlfcn.h>
#include <string.h>

#define LIBRARY "libibverbs.so.1"

static bool load(struct kvs_verbs *verbs, struct kvs_text *text)
{
	void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	if (library == NULL) {
		const char *why = dlerror();
		kvs_text_set(text, "%s", why != NULL ? why : LIBRARY " cannot be opened");
		return false;
	}
	void *symbol;
	/* Through memory: ISO C has no conversion from an object pointer to a function's. */
#define X(result, name, symbol_name, version, params) \
	symbol = dlvsym(library, symbol_name, version); \
	memcpy(&verbs->name, &symbol, sizeof(symbol)); \
	if (symbol == NULL) \
		missing = symbol_name "@" version;
	const char *missing = NULL;
	KVS_VERBS_OPTIONAL(X)
	missing = NULL;
	KVS_VERBS_FUNCTIONS(X)
#undef X
	if (missing == NULL)
		return true;
	kvs_text_set(text, "%s has no %s: it is too old, version 1.11 of 2020 is needed", LIBRARY, missing);
	return false;
}

const struct kvs_verbs *kvs_verbs_load(struct kvs_text *text)
{
	static struct kvs_verbs verbs;
	static struct kvs_text why;
	static enum { UNTRIED, LOADED, MISSING } state;
	if (state == UNTRIED)
		state = load(&verbs, &why) ? LOADED : MISSING;
	if (state == LOADED)
		return &verbs;
	kvs_text_set(text, "%s", why.s);
	return NULL;
}
