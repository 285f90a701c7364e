/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "api.h"

#include <dlfcn.h>
#include <string.h>

struct kvs_py_api kvs_py;

/* A lookup that fails leaves a message that the program's own next dlerror() would find. */
static void *look_up(const char *name)
{
	void *symbol = dlsym(RTLD_DEFAULT, name);
	if (!symbol)
		while (dlerror())
			;
	return symbol;
}

bool kvs_py_present(void)
{
	return look_up("PySys_AddAuditHook") != NULL;
}

bool kvs_py_load(void)
{
	struct kvs_py_api found;
	void *symbol = NULL;
	/* Object pointers are copied into function pointers as bytes: POSIX promises that this works for dlsym. */
#define X(result, name, parameters) \
	symbol = look_up(#name); \
	if (!symbol) \
		return false; \
	memcpy(&found.name, &symbol, sizeof symbol);
	KVS_PY_TABLE(X)
#undef X
	found.none = look_up("_Py_NoneStruct");
	found.object_type = look_up("PyBaseObject_Type");
	if (!found.none || !found.object_type)
		return false;
	kvs_py = found;
	return true;
}

bool kvs_py_is_exact(KvsPyObject *object, KvsPyObject *class_object)
{
	if (!object || !class_object)
		return false;
	KvsPyObject *type = kvs_py.PyObject_Type(object);
	bool exact = type == class_object;
	kvs_py.Py_DecRef(type);
	return exact;
}

KvsPyObject *kvs_py_attr(KvsPyObject *object, const char *name)
{
	KvsPyObject *value = object ? kvs_py.PyObject_GetAttrString(object, name) : NULL;
	if (!value)
		kvs_py.PyErr_Clear();
	return value;
}

/* Drop the attribute and any exception; true: none was set. */
static bool finish(KvsPyObject *value)
{
	bool ok = !kvs_py.PyErr_Occurred();
	if (!ok)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(value);
	return ok;
}

bool kvs_py_attr_i64(KvsPyObject *object, const char *name, int64_t *value_p)
{
	KvsPyObject *value = kvs_py_attr(object, name);
	if (!value)
		return false;
	long long number = kvs_py.PyLong_AsLongLong(value);
	if (!finish(value))
		return false;
	*value_p = number;
	return true;
}

bool kvs_py_attr_u64(KvsPyObject *object, const char *name, uint64_t *value_p)
{
	KvsPyObject *value = kvs_py_attr(object, name);
	if (!value)
		return false;
	unsigned long long number = kvs_py.PyLong_AsUnsignedLongLong(value);
	if (!finish(value))
		return false;
	*value_p = number;
	return true;
}

bool kvs_py_attr_true(KvsPyObject *object, const char *name)
{
	KvsPyObject *value = kvs_py_attr(object, name);
	if (!value)
		return false;
	int truth = kvs_py.PyObject_IsTrue(value);
	return finish(value) && truth > 0;
}

bool kvs_py_text(KvsPyObject *object, char *buffer, size_t size)
{
	ssize_t length = 0;
	const char *text = object ? kvs_py.PyUnicode_AsUTF8AndSize(object, &length) : NULL;
	if (!text) {
		kvs_py.PyErr_Clear();
		return false;
	}
	/* A text with a zero byte or one that does not fit is not the text that was asked for. */
	if (length < 0 || (size_t)length >= size || strlen(text) != (size_t)length)
		return false;
	memcpy(buffer, text, (size_t)length + 1);
	return true;
}

bool kvs_py_attr_text(KvsPyObject *object, const char *name, char *buffer, size_t size)
{
	KvsPyObject *value = kvs_py_attr(object, name);
	bool ok = kvs_py_text(value, buffer, size);
	kvs_py.Py_DecRef(value);
	return ok;
}

KvsPyObject *kvs_py_call_original(KvsPyObject *original, KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	ssize_t count = kvs_py.PyTuple_Size(args);
	KvsPyObject *all = count < 0 ? NULL : kvs_py.PyTuple_New(count + 1);
	if (!all)
		return NULL;
	kvs_py.Py_IncRef(self);
	kvs_py.PyTuple_SetItem(all, 0, self);
	for (ssize_t i = 0; i < count; i++) {
		KvsPyObject *item = kvs_py.PyTuple_GetItem(args, i);
		kvs_py.Py_IncRef(item);
		kvs_py.PyTuple_SetItem(all, i + 1, item);
	}
	KvsPyObject *result = kvs_py.PyObject_Call(original, all, kwargs);
	kvs_py.Py_DecRef(all);
	return result;
}

KvsPyObject *kvs_py_argument(KvsPyObject *args, KvsPyObject *kwargs, ssize_t index, const char *name)
{
	if (index >= 0 && index < kvs_py.PyTuple_Size(args))
		return kvs_py.PyTuple_GetItem(args, index);
	return kwargs && name ? kvs_py.PyDict_GetItemString(kwargs, name) : NULL;
}
