/* SPDX-License-Identifier: Apache-2.0 */
#include "patch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../policy/text.h"
#include "../../transport/log.h"
#include "../options.h"
#include "signature.h"

/* What is to become of one method. All strong references. */
struct change {
	struct kvs_method *method;
	KvsPyObject *leaf;       /* the class that the table names */
	KvsPyObject *own;        /* the entry in its __dict__ before the change; NULL: it inherits the method */
	KvsPyObject *original;   /* unbound */
	KvsPyObject *descriptor; /* ours; NULL in a plan that fits: there is no such method, and need not be */
	bool set;
};

struct role_plan {
	const struct kvs_connector_role *role;
	struct change *changes; /* role->method_count of them */
	bool fits;
	struct kvs_text why_not;
};

/* ---- looking ---- */

/* class.__dict__[name], new; NULL when it is not there. */
static KvsPyObject *dict_entry(KvsPyObject *class_object, const char *name)
{
	KvsPyObject *dict = kvs_py_attr(class_object, "__dict__");
	KvsPyObject *key = dict ? kvs_py.PyUnicode_FromString(name) : NULL;
	KvsPyObject *entry = key ? kvs_py.PyObject_GetItem(dict, key) : NULL;
	if (!entry)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(key);
	kvs_py.Py_DecRef(dict);
	return entry;
}

/* The first definition along the MRO, new. */
static KvsPyObject *first_definition(KvsPyObject *class_object, const char *name)
{
	KvsPyObject *order = kvs_py_attr(class_object, "__mro__");
	KvsPyObject *entry = NULL;
	ssize_t count = order ? kvs_py.PyTuple_Size(order) : 0;
	for (ssize_t i = 0; i < count && !entry; i++)
		entry = dict_entry(kvs_py.PyTuple_GetItem(order, i), name);
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(order);
	return entry;
}

/* Is the entry an object of the built-in class of this name? */
static bool is_a(KvsPyObject *entry, const char *type_name)
{
	char name[32];
	KvsPyObject *type = kvs_py.PyObject_Type(entry);
	bool yes = kvs_py_attr_text(type, "__name__", name, sizeof name) && strcmp(name, type_name) == 0;
	kvs_py.Py_DecRef(type);
	return yes;
}

/* What is called with self (or the class) in front. New; NULL with text when the definition is of another kind. */
static KvsPyObject *unbound(const struct kvs_method *method, KvsPyObject *definition, struct kvs_text *text)
{
	bool class_method = is_a(definition, "classmethod");
	if (is_a(definition, "staticmethod") || class_method != (method->kind == KVS_CLASSMETHOD)) {
		kvs_text_set(text, "%s.%s is %s", method->class_name, method->name,
		             method->kind == KVS_CLASSMETHOD ? "no class method" : "no method of instances");
		return NULL;
	}
	if (class_method)
		return kvs_py_attr(definition, "__func__");
	kvs_py.Py_IncRef(definition);
	return definition;
}

static KvsPyObject *make_descriptor(struct kvs_method *method)
{
	method->definition = (struct kvs_py_method_def){
	        .name = method->name,
	        .function = method->replacement,
	        .flags = KVS_PY_METH_VARARGS | KVS_PY_METH_KEYWORDS,
	};
	/*
	 * A descriptor "of object", not of the class: one of the class would raise TypeError for a duck-typed self,
	 * which the Python function that we replace takes.
	 */
	if (method->kind == KVS_CLASSMETHOD)
		return kvs_py.PyDescr_NewClassMethod(kvs_py.object_type, &method->definition);
	return kvs_py.PyDescr_NewMethod(kvs_py.object_type, &method->definition);
}

static bool plan_change(struct change *change, KvsPyObject *module, struct kvs_text *text)
{
	struct kvs_method *method = change->method;
	change->leaf = kvs_py_attr(module, method->class_name);
	if (!change->leaf) {
		kvs_text_set(text, "there is no class %s", method->class_name);
		return false;
	}
	change->own = dict_entry(change->leaf, method->name);
	KvsPyObject *definition = first_definition(change->leaf, method->name);
	if (!definition && method->kind == KVS_METHOD_IF_ANY)
		return true;
	if (!definition) {
		kvs_text_set(text, "class %s has no method %s", method->class_name, method->name);
		return false;
	}
	change->original = unbound(method, definition, text);
	kvs_py.Py_DecRef(definition);
	if (!change->original)
		return false;
	struct kvs_text difference = {""};
	if (!kvs_signature_fits(change->original, method->parameters, &difference)) {
		kvs_text_set(text, "%s.%s %s", method->class_name, method->name, difference.s);
		return false;
	}
	change->descriptor = make_descriptor(method);
	if (!change->descriptor) {
		kvs_py.PyErr_Clear();
		kvs_text_set(text, "no memory for the replacement of %s.%s", method->class_name, method->name);
	}
	return change->descriptor != NULL;
}

static void plan_role(struct role_plan *plan, struct kvs_connector_role *role, KvsPyObject *module)
{
	plan->role = role;
	plan->changes = calloc(role->method_count, sizeof *plan->changes);
	if (!plan->changes) {
		kvs_text_set(&plan->why_not, "no memory for %zu changes", role->method_count);
		return;
	}
	plan->fits = true;
	for (size_t i = 0; i < role->method_count && plan->fits; i++) {
		plan->changes[i].method = &role->methods[i];
		plan->fits = plan_change(&plan->changes[i], module, &plan->why_not);
	}
}

static void drop_plan(struct role_plan *plan)
{
	for (size_t i = 0; plan->changes && i < plan->role->method_count; i++) {
		struct change *change = &plan->changes[i];
		kvs_py.Py_DecRef(change->leaf);
		kvs_py.Py_DecRef(change->own);
		kvs_py.Py_DecRef(change->original);
		kvs_py.Py_DecRef(change->descriptor);
	}
	free(plan->changes);
}

/* ---- changing ---- */

static void publish(KvsPyObject **place, KvsPyObject *object)
{
	if (!place)
		return;
	kvs_py.Py_IncRef(object);
	*place = object;
}

/* A role before this one may have replaced the same method a moment ago: then its replacement is our original. */
static void chain(struct change *change)
{
	KvsPyObject *now = dict_entry(change->leaf, change->method->name);
	if (now == change->own) {
		kvs_py.Py_DecRef(now);
		return;
	}
	kvs_py.Py_DecRef(change->own);
	kvs_py.Py_DecRef(change->original);
	change->own = now;
	kvs_py.Py_IncRef(now);
	change->original = now;
}

static bool apply(struct change *change)
{
	if (!change->descriptor)
		return true;
	chain(change);
	publish(change->method->original_p, change->original);
	publish(change->method->class_p, change->leaf);
	change->set = kvs_py.PyObject_SetAttrString(change->leaf, change->method->name, change->descriptor) == 0;
	kvs_py.PyErr_Clear();
	return change->set;
}

/* Calls that are already inside the replacement still need the original, so what was published stays. */
static void undo(struct role_plan *plan, size_t count)
{
	while (count-- > 0) {
		struct change *change = &plan->changes[count];
		/* own NULL deletes the attribute, so that the class inherits again */
		if (change->set)
			kvs_py.PyObject_SetAttrString(change->leaf, change->method->name, change->own);
		kvs_py.PyErr_Clear();
	}
}

static void commit_role(struct role_plan *plan)
{
	for (size_t i = 0; plan->fits && i < plan->role->method_count; i++) {
		if (apply(&plan->changes[i]))
			continue;
		kvs_text_set(&plan->why_not, "%s.%s cannot be replaced", plan->changes[i].method->class_name,
		             plan->changes[i].method->name);
		undo(plan, i);
		plan->fits = false;
	}
}

/* ---- saying ---- */

static void find_version(const char *module_name, char *package, size_t package_size, char *version, size_t size)
{
	snprintf(package, package_size, "%.*s", (int)strcspn(module_name, "."), module_name);
	snprintf(version, size, "unknown");
	KvsPyObject *top = kvs_py.PyDict_GetItemString(kvs_py.PyImport_GetModuleDict(), package);
	kvs_py_attr_text(top, "__version__", version, size);
}

static void say(const struct kvs_connector *connector, const struct role_plan *plans)
{
	char package[64], version[64], roles[128] = "";
	find_version(connector->module, package, sizeof package, version, sizeof version);
	for (size_t i = 0; i < connector->role_count; i++) {
		const char *name = plans[i].role->name;
		if (!plans[i].fits) {
			kvs_log_write(KVS_LOG_WARN, "hook", "%s %s of %s %s is left as it was: %s", connector->name,
			              name, package, version, plans[i].why_not.s);
			continue;
		}
		size_t used = strlen(roles);
		snprintf(roles + used, sizeof roles - used, "%s%s", used ? ", " : "", name);
	}
	int size = 0;
	const char *policy = kvs_option_word_name(KVS_POLICY_WORDS, kvs_options()->policy, &size);
	if (*roles)
		kvs_log_write(KVS_LOG_INFO, "hook", "kvsplice %s hooked %s %s of %s %s; policy %.*s; transports %s",
		              KVS_VERSION, connector->name, roles, package, version, size, policy ? policy : "",
		              kvs_options()->transport);
}

void kvs_patch(struct kvs_connector *connector, KvsPyObject *module, atomic_bool *done)
{
	if (connector->prepare && !connector->prepare(module)) {
		atomic_store(done, true);
		return;
	}
	struct role_plan *plans = calloc(connector->role_count, sizeof *plans);
	if (!plans) {
		kvs_log_write(KVS_LOG_ERROR, "hook", "%s is left as it was: no memory", connector->name);
		atomic_store(done, true);
		return;
	}
	for (size_t i = 0; i < connector->role_count; i++)
		plan_role(&plans[i], &connector->roles[i], module);
	/* Planning may let another thread run; from here to the last replacement nothing does. */
	bool ours = !atomic_exchange(done, true);
	for (size_t i = 0; ours && i < connector->role_count; i++)
		commit_role(&plans[i]);
	if (ours)
		say(connector, plans);
	for (size_t i = 0; i < connector->role_count; i++)
		drop_plan(&plans[i]);
	free(plans);
}
