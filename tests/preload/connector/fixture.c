/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connectors for the hook's own tests, in place of shim/connectors/. The replacements mark what they did: for an object
 * of exactly the class the result is ("spliced", original's result), for any other the original's result. The modules
 * are written by the tests, in shapes that fit and shapes that do not.
 */
#include "../../../shim/connectors/connector.h"

/* class, method, Python name, kind, parameters */
#define PREFILL_TABLE(X) \
	X(manager, Manager, send, "send", KVS_METHOD, "self req pages executor", &manager_class) \
	X(manager, Manager, shared, "shared", KVS_METHOD, "self", NULL) \
	X(info, Info, from_wire, "from_wire", KVS_CLASSMETHOD, "cls msg", &info_class) \
	X(sender, Sender, init, "__init__", KVS_METHOD, "self mgr addr ...", &sender_class)
#define DECODE_TABLE(X) \
	X(receiver, Receiver, poll, "poll", KVS_METHOD, "self", &receiver_class) \
	X(manager, Manager, again, "shared", KVS_METHOD, "self", NULL)
#define OTHER_TABLE(X) \
	X(other, Other, work, "work", KVS_METHOD, "self|self job|self task size ...", &other_class) \
	X(other, Other, extra, "extra", KVS_METHOD_IF_ANY, "self more", NULL) \
	X(other, Other, late, "late", KVS_METHOD_IF_ANY, "self|self when", NULL)

static KvsPyObject *manager_class, *info_class, *sender_class, *receiver_class, *other_class;

static KvsPyObject *mark(KvsPyObject *result)
{
	KvsPyObject *pair = result ? kvs_py.PyTuple_New(2) : NULL;
	if (!pair)
		return NULL;
	kvs_py.PyTuple_SetItem(pair, 0, kvs_py.PyUnicode_FromString("spliced"));
	kvs_py.PyTuple_SetItem(pair, 1, result);
	return pair;
}

static KvsPyObject *respond(bool exact, const char *name, KvsPyObject *original, KvsPyObject *self, KvsPyObject *args,
                            KvsPyObject *kwargs)
{
	KvsPyObject *result = kvs_py_call_original(original, self, args, kwargs);
	if (!exact)
		return result;
	/* __init__ may return nothing but None: it leaves its mark on the object. */
	if (result == kvs_py.none && name[0] == '_') {
		KvsPyObject *text = kvs_py.PyUnicode_FromString("spliced");
		kvs_py.PyObject_SetAttrString(self, "mark", text);
		kvs_py.Py_DecRef(text);
		return result;
	}
	return mark(result);
}

#define IS_OURS_KVS_METHOD(self, class_object)        kvs_py_is_exact(self, class_object)
#define IS_OURS_KVS_METHOD_IF_ANY(self, class_object) kvs_py_is_exact(self, class_object)
#define IS_OURS_KVS_CLASSMETHOD(self, class_object)   ((self) == (class_object))
#define REPLACEMENT(object, class_name, method, name, kind, parameters, class_p) \
	static KvsPyObject *original_##object##_##method; \
	static KvsPyObject *object##_##method(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs) \
	{ \
		return respond(IS_OURS_##kind(self, object##_class), name, original_##object##_##method, self, args, \
		               kwargs); \
	}
PREFILL_TABLE(REPLACEMENT)
DECODE_TABLE(REPLACEMENT)
OTHER_TABLE(REPLACEMENT)

#define ROW(object, the_class, method, the_name, the_kind, the_parameters, the_class_p) \
	{.class_name = #the_class, \
	 .name = the_name, \
	 .kind = the_kind, \
	 .parameters = the_parameters, \
	 .replacement = object##_##method, \
	 .original_p = &original_##object##_##method, \
	 .class_p = the_class_p},
static struct kvs_method prefill_methods[] = {PREFILL_TABLE(ROW)};
static struct kvs_method decode_methods[] = {DECODE_TABLE(ROW)};
static struct kvs_method other_methods[] = {OTHER_TABLE(ROW)};

#define ROLE(name, methods) \
	{ \
		name, methods, sizeof(methods) / sizeof *(methods) \
	}
static struct kvs_connector_role fixture_roles[] = {ROLE("prefill", prefill_methods), ROLE("decode", decode_methods)};
static struct kvs_connector_role other_roles[] = {ROLE("prefill", other_methods)};

/* A module may say that it is not to be hooked. */
static int prepare(KvsPyObject *module)
{
	return !kvs_py_attr_true(module, "LEAVE_ALONE");
}

static struct kvs_connector fixture = {"fixture", "kvs_fixture.conn", prepare, fixture_roles, 2};
static struct kvs_connector other = {"other", "kvs_fixture.other", NULL, other_roles, 1};

struct kvs_connector *const kvs_connectors[] = {&fixture, &other};
const size_t kvs_connector_count = 2;
