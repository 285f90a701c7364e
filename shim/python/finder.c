/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A finder at the head of sys.meta_path, there only while the hook imports. It asks the finders behind it, as the
 * interpreter would, and puts a function of ours in front of the exec_module of the loader that they name; the loader
 * is as it was before the module's code runs.
 */
#include "finder.h"

#include <stddef.h>

static const struct kvs_finder *owner;
static KvsPyObject *object; /* what is in sys.meta_path; kept for the life of the process */
static __thread bool asking __attribute__((tls_model("initial-exec")));

/* loader.exec_module(module), once. */
static KvsPyObject *exec_module(KvsPyObject *loader, KvsPyObject *args, KvsPyObject *kwargs)
{
	kvs_py.Py_IncRef(loader);
	/* NULL deletes: the loader has its class's method again */
	if (kvs_py.PyObject_SetAttrString(loader, "exec_module", NULL) != 0)
		kvs_py.PyErr_Clear();
	KvsPyObject *stock = kvs_py.PyObject_GetAttrString(loader, "exec_module");
	KvsPyObject *result = stock ? kvs_py.PyObject_Call(stock, args, kwargs) : NULL;
	if (result && kvs_py.PyTuple_Size(args) > 0)
		owner->loaded(kvs_py.PyTuple_GetItem(args, 0));
	kvs_py.Py_DecRef(stock);
	kvs_py.Py_DecRef(loader);
	return result;
}

static struct kvs_py_method_def exec_module_def = {
        .name = "exec_module",
        .function = exec_module,
        .flags = KVS_PY_METH_VARARGS | KVS_PY_METH_KEYWORDS,
};

static bool has_own(KvsPyObject *loader, const char *name)
{
	KvsPyObject *dict = kvs_py_attr(loader, "__dict__");
	KvsPyObject *key = dict ? kvs_py.PyUnicode_FromString(name) : NULL;
	KvsPyObject *entry = key ? kvs_py.PyObject_GetItem(dict, key) : NULL;
	bool own = entry != NULL || !dict;
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(entry);
	kvs_py.Py_DecRef(key);
	kvs_py.Py_DecRef(dict);
	return own;
}

/* A loader that cannot be wrapped is left alone: the module is then patched when its import returns. */
static void wrap_loader(KvsPyObject *spec)
{
	KvsPyObject *loader = kvs_py_attr(spec, "loader");
	if (loader && loader != kvs_py.none && !has_own(loader, "exec_module")) {
		KvsPyObject *function = kvs_py.PyCFunction_NewEx(&exec_module_def, loader, NULL);
		if (function)
			kvs_py.PyObject_SetAttrString(loader, "exec_module", function);
		kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(function);
	}
	kvs_py.Py_DecRef(loader);
}

/* What the first finder that knows the module says; new; NULL: none does, or the exception is set. */
static KvsPyObject *ask_others(KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *sys = kvs_py.PyDict_GetItemString(kvs_py.PyImport_GetModuleDict(), "sys");
	KvsPyObject *path = kvs_py_attr(sys, "meta_path");
	KvsPyObject *finders = path ? kvs_py.PySequence_Tuple(path) : NULL;
	KvsPyObject *spec = NULL;
	ssize_t count = finders ? kvs_py.PyTuple_Size(finders) : 0;
	for (ssize_t i = 0; i < count && !spec && !kvs_py.PyErr_Occurred(); i++) {
		KvsPyObject *find = kvs_py_attr(kvs_py.PyTuple_GetItem(finders, i), "find_spec");
		if (find)
			spec = kvs_py.PyObject_Call(find, args, kwargs);
		kvs_py.Py_DecRef(find);
		if (spec == kvs_py.none) {
			kvs_py.Py_DecRef(spec);
			spec = NULL;
		}
	}
	kvs_py.Py_DecRef(finders);
	kvs_py.Py_DecRef(path);
	return spec;
}

/* find_spec(name, path, target) */
static KvsPyObject *find_spec(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	(void)self;
	KvsPyObject *name = kvs_py_argument(args, kwargs, 0, "fullname");
	KvsPyObject *spec = NULL;
	if (!asking && name && owner->wanted(name)) {
		asking = true;
		spec = ask_others(args, kwargs);
		asking = false;
		if (spec)
			wrap_loader(spec);
		else if (kvs_py.PyErr_Occurred())
			return NULL;
	}
	if (!spec) {
		spec = kvs_py.none;
		kvs_py.Py_IncRef(spec);
	}
	return spec;
}

static struct kvs_py_method_def find_spec_def = {
        .name = "find_spec",
        .function = find_spec,
        .flags = KVS_PY_METH_VARARGS | KVS_PY_METH_KEYWORDS,
};

/* Any object with a find_spec will do: a namespace, which is what sys.implementation is. New. */
static KvsPyObject *make_object(KvsPyObject *sys)
{
	KvsPyObject *example = kvs_py_attr(sys, "implementation");
	KvsPyObject *type = example ? kvs_py.PyObject_Type(example) : NULL;
	KvsPyObject *made = type ? kvs_py.PyObject_CallObject(type, NULL) : NULL;
	KvsPyObject *function = made ? kvs_py.PyCFunction_NewEx(&find_spec_def, NULL, NULL) : NULL;
	if (!function || kvs_py.PyObject_SetAttrString(made, "find_spec", function) != 0) {
		kvs_py.Py_DecRef(made);
		made = NULL;
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(function);
	kvs_py.Py_DecRef(type);
	kvs_py.Py_DecRef(example);
	return made;
}

/* sys.meta_path.<method>(object) or (0, object) */
static bool change_path(KvsPyObject *sys, const char *method, bool at_head)
{
	KvsPyObject *path = kvs_py_attr(sys, "meta_path");
	KvsPyObject *call = path ? kvs_py_attr(path, method) : NULL;
	KvsPyObject *zero = kvs_py.PyLong_FromLongLong(0);
	KvsPyObject *result = NULL;
	if (call && zero)
		result = at_head ? kvs_py.PyObject_CallFunctionObjArgs(call, zero, object, NULL)
		                 : kvs_py.PyObject_CallFunctionObjArgs(call, object, NULL);
	bool ok = result != NULL;
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(result);
	kvs_py.Py_DecRef(zero);
	kvs_py.Py_DecRef(call);
	kvs_py.Py_DecRef(path);
	return ok;
}

bool kvs_finder_enter(const struct kvs_finder *finder)
{
	owner = finder;
	KvsPyObject *sys = kvs_py.PyDict_GetItemString(kvs_py.PyImport_GetModuleDict(), "sys");
	if (!object)
		object = make_object(sys);
	return object && change_path(sys, "insert", true);
}

void kvs_finder_leave(void)
{
	KvsPyObject *type = NULL, *value = NULL, *traceback = NULL;
	kvs_py.PyErr_Fetch(&type, &value, &traceback);
	change_path(kvs_py.PyDict_GetItemString(kvs_py.PyImport_GetModuleDict(), "sys"), "remove", false);
	kvs_py.PyErr_Restore(type, value, traceback);
}
