/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an adapter gives the interpreter hook: the methods it replaces, per role, as a table. A role is hooked all or
 * nothing, after its module was imported: every class and method must be there with the expected parameters.
 */
#ifndef KVS_CONNECTOR_H
#define KVS_CONNECTOR_H

#include <stddef.h>

#include "../python/api.h"

enum kvs_method_kind {
	KVS_METHOD,        /* called as self.method(...): the replacement's first argument is self */
	KVS_CLASSMETHOD,   /* called as cls.method(...): the replacement's first argument is the class */
	KVS_METHOD_IF_ANY, /* as KVS_METHOD; a class without the method fits as well and stays without it */
};

struct kvs_method {
	const char *class_name;
	const char *name;
	enum kvs_method_kind kind;
	/* Parameter names the original must start with, space-separated, "self" or "cls" included. More parameters are
	 * accepted when they have defaults, or without any condition when the list ends in "...". Several such lists,
	 * separated by '|', are alternatives: the shapes of different releases. */
	const char *parameters;
	KvsPyObject *(*replacement)(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs);
	/* Set by the hook before the replacement goes in: the unbound original (first definition along the MRO), a
	 * strong reference for the life of the process. Call it as original(self_or_cls, *args, **kwargs). */
	KvsPyObject **original_p;
	/* Set by the hook: the class, strong reference; for exact-type checks (kvs_py_is_exact). May be NULL. */
	KvsPyObject **class_p;
	/* The hook's own: leave it out. Python keeps a pointer to it. */
	struct kvs_py_method_def definition;
};

/* A method of an adapter's table, whose replacement and original are called replace_<id> and original_<id>. */
#define KVS_METHOD_ROW(id, class, method, method_kind, parameter_list, class_slot) \
	{.class_name = (class), \
	 .name = (method), \
	 .kind = (method_kind), \
	 .parameters = (parameter_list), \
	 .replacement = replace_##id, \
	 .original_p = &original_##id, \
	 .class_p = (class_slot)},

#define KVS_ROLE(role_name, table) \
	{ \
		.name = (role_name), .methods = (table), .method_count = sizeof(table) / sizeof((table)[0]) \
	}

/*
 * A method may be in several roles: the later role's original is then the earlier role's replacement. A replacement is
 * called with whatever Python was given as self, so anything that is not exactly the class goes to the original.
 */

struct kvs_connector_role {
	const char *name; /* "prefill" or "decode" */
	struct kvs_method *methods;
	size_t method_count;
};

struct kvs_connector {
	const char *name;   /* "mooncake" */
	const char *module; /* "sglang.srt.disaggregation.mooncake.conn" */
	/* Called with the interpreter lock held before the roles are looked at; false, said in the log, leaves the
	 * whole connector alone. Two threads that import the module at once may both call it: the second call must
	 * find nothing to do. No exception may be left set. NULL: nothing to prepare. */
	int (*prepare)(KvsPyObject *module);
	struct kvs_connector_role *roles;
	size_t role_count;
};

/* Every adapter of this build. */
extern struct kvs_connector kvs_mooncake;
extern struct kvs_connector kvs_nixl;
extern struct kvs_connector kvs_mori;
#define KVS_CONNECTOR_TABLE(X) X(kvs_mooncake) X(kvs_nixl) X(kvs_mori)
#define KVS_MAX_CONNECTORS     8

extern struct kvs_connector *const kvs_connectors[];
extern const size_t kvs_connector_count;

#endif
