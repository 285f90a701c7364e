/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPython calls that we use, resolved at run time from the interpreter that this process is. Own declarations:
 * there are no Python headers at build time, and only calls of the stable ABI (PEP 384) that 3.9 and later export.
 */
#ifndef KVS_PYTHON_API_H
#define KVS_PYTHON_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct kvs_py_object KvsPyObject; /* CPython's PyObject, opaque */

typedef KvsPyObject *(*kvs_py_function_t)(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs);
typedef int (*kvs_py_audit_t)(const char *event, KvsPyObject *args, void *user);

/* PyMethodDef, the same since 3.0 */
struct kvs_py_method_def {
	const char *name;
	kvs_py_function_t function;
	int flags;
	const char *doc;
};
#define KVS_PY_METH_VARARGS  0x0001
#define KVS_PY_METH_KEYWORDS 0x0002
#define KVS_PY_METH_CLASS    0x0010

/* PyMemAllocatorEx, the same since 3.5 */
struct kvs_py_allocator {
	void *context;
	void *(*malloc)(void *context, size_t size);
	void *(*calloc)(void *context, size_t count, size_t size);
	void *(*realloc)(void *context, void *block, size_t size);
	void (*free)(void *context, void *block);
};

/* return type, name, parameters */
#define KVS_PY_TABLE(X) \
	X(int, PySys_AddAuditHook, (kvs_py_audit_t hook, void *user)) \
	X(void, PyMem_GetAllocator, (int domain, struct kvs_py_allocator *allocator)) \
	X(void, PyMem_SetAllocator, (int domain, struct kvs_py_allocator *allocator)) \
	X(KvsPyObject *, PyImport_ImportModule, (const char *name)) \
	X(KvsPyObject *, PyImport_ImportModuleLevelObject, \
	  (KvsPyObject * name, KvsPyObject * globals, KvsPyObject * locals, KvsPyObject * fromlist, int level)) \
	X(KvsPyObject *, PyImport_GetModuleDict, (void)) \
	X(KvsPyObject *, PyObject_GetAttrString, (KvsPyObject * object, const char *name)) \
	X(int, PyObject_SetAttrString, (KvsPyObject * object, const char *name, KvsPyObject *value)) \
	X(KvsPyObject *, PyObject_Call, (KvsPyObject * callable, KvsPyObject * args, KvsPyObject * kwargs)) \
	X(KvsPyObject *, PyObject_CallObject, (KvsPyObject * callable, KvsPyObject * args)) \
	X(KvsPyObject *, PyObject_CallFunctionObjArgs, (KvsPyObject * callable, ...)) \
	X(KvsPyObject *, PyObject_CallMethodObjArgs, (KvsPyObject * object, KvsPyObject * name, ...)) \
	X(KvsPyObject *, PyObject_Type, (KvsPyObject * object)) \
	X(KvsPyObject *, PyObject_Str, (KvsPyObject * object)) \
	X(KvsPyObject *, PyObject_Repr, (KvsPyObject * object)) \
	X(KvsPyObject *, PyObject_GetItem, (KvsPyObject * object, KvsPyObject * key)) \
	X(int, PyObject_IsTrue, (KvsPyObject * object)) \
	X(int, PyObject_IsInstance, (KvsPyObject * object, KvsPyObject * type)) \
	X(int, PyCallable_Check, (KvsPyObject * object)) \
	X(ssize_t, PyObject_Size, (KvsPyObject * object)) \
	X(KvsPyObject *, PySequence_GetItem, (KvsPyObject * object, ssize_t index)) \
	X(KvsPyObject *, PySequence_List, (KvsPyObject * object)) \
	X(KvsPyObject *, PySequence_Tuple, (KvsPyObject * object)) \
	X(ssize_t, PySequence_Size, (KvsPyObject * object)) \
	X(KvsPyObject *, PyList_New, (ssize_t size)) \
	X(ssize_t, PyList_Size, (KvsPyObject * list)) \
	X(KvsPyObject *, PyList_GetItem, (KvsPyObject * list, ssize_t index)) \
	X(int, PyList_SetItem, (KvsPyObject * list, ssize_t index, KvsPyObject * item)) \
	X(int, PyList_Append, (KvsPyObject * list, KvsPyObject * item)) \
	X(KvsPyObject *, PyTuple_New, (ssize_t size)) \
	X(ssize_t, PyTuple_Size, (KvsPyObject * tuple)) \
	X(KvsPyObject *, PyTuple_GetItem, (KvsPyObject * tuple, ssize_t index)) \
	X(int, PyTuple_SetItem, (KvsPyObject * tuple, ssize_t index, KvsPyObject * item)) \
	X(KvsPyObject *, PyDict_New, (void)) \
	X(KvsPyObject *, PyDict_GetItemString, (KvsPyObject * dict, const char *key)) \
	X(KvsPyObject *, PyDict_GetItemWithError, (KvsPyObject * dict, KvsPyObject * key)) \
	X(ssize_t, PyDict_Size, (KvsPyObject * dict)) \
	X(int, PyDict_SetItemString, (KvsPyObject * dict, const char *key, KvsPyObject *value)) \
	X(int, PyDict_Next, (KvsPyObject * dict, ssize_t * position, KvsPyObject * *key, KvsPyObject * *value)) \
	X(KvsPyObject *, PyLong_FromLongLong, (long long value)) \
	X(KvsPyObject *, PyLong_FromUnsignedLongLong, (unsigned long long value)) \
	X(long long, PyLong_AsLongLong, (KvsPyObject * object)) \
	X(unsigned long long, PyLong_AsUnsignedLongLong, (KvsPyObject * object)) \
	X(KvsPyObject *, PyUnicode_FromString, (const char *text)) \
	X(const char *, PyUnicode_AsUTF8AndSize, (KvsPyObject * object, ssize_t * size)) \
	X(KvsPyObject *, PyBytes_FromStringAndSize, (const char *data, ssize_t size)) \
	X(int, PyBytes_AsStringAndSize, (KvsPyObject * object, char **data, ssize_t *size)) \
	X(KvsPyObject *, PyCapsule_New, (void *pointer, const char *name, void (*destroy)(KvsPyObject *))) \
	X(void *, PyCapsule_GetPointer, (KvsPyObject * capsule, const char *name)) \
	X(KvsPyObject *, PyCFunction_NewEx, \
	  (struct kvs_py_method_def * definition, KvsPyObject * self, KvsPyObject * module)) \
	X(KvsPyObject *, PyDescr_NewMethod, (KvsPyObject * type, struct kvs_py_method_def * definition)) \
	X(KvsPyObject *, PyDescr_NewClassMethod, (KvsPyObject * type, struct kvs_py_method_def * definition)) \
	X(KvsPyObject *, PyErr_Occurred, (void)) \
	X(void, PyErr_Clear, (void)) \
	X(void, PyErr_Fetch, (KvsPyObject * *type, KvsPyObject * *value, KvsPyObject * *traceback)) \
	X(void, PyErr_Restore, (KvsPyObject * type, KvsPyObject * value, KvsPyObject * traceback)) \
	X(void, PyErr_SetString, (KvsPyObject * type, const char *message)) \
	X(void *, PyEval_SaveThread, (void)) \
	X(void, PyEval_RestoreThread, (void *state)) \
	X(void *, PyInterpreterState_Get, (void)) \
	X(int64_t, PyInterpreterState_GetID, (void *interpreter)) \
	X(void, Py_IncRef, (KvsPyObject * object)) \
	X(void, Py_DecRef, (KvsPyObject * object))

struct kvs_py_api {
#define X(result, name, parameters) result(*name) parameters;
	KVS_PY_TABLE(X)
#undef X
	/* Data symbols, borrowed for ever. */
	KvsPyObject *none;        /* Py_None */
	KvsPyObject *object_type; /* the class object */
};

/* Valid after kvs_py_load has returned true. */
extern struct kvs_py_api kvs_py;

/* Is there a CPython with audit hooks in this process? Looks up one symbol. */
bool kvs_py_present(void);

/* Resolve the table in this process; false: this is no Python that we know, and nothing may be called. */
bool kvs_py_load(void);

/* ---- helpers, interpreter lock held; "new" means a new reference ---- */

/* Is type(object) exactly this class? False on NULL. */
bool kvs_py_is_exact(KvsPyObject *object, KvsPyObject *class_object);

/* object.name as an integer / true-ness / UTF-8 text. False, with no exception left set, when absent or of another
 * type. */
bool kvs_py_attr_i64(KvsPyObject *object, const char *name, int64_t *value_p);
bool kvs_py_attr_u64(KvsPyObject *object, const char *name, uint64_t *value_p);
bool kvs_py_attr_true(KvsPyObject *object, const char *name);
bool kvs_py_attr_text(KvsPyObject *object, const char *name, char *buffer, size_t size);

/* A str as UTF-8. False, with no exception left set, when NULL, not a str, or longer than size - 1 bytes. */
bool kvs_py_text(KvsPyObject *object, char *buffer, size_t size);

/* object.name, new; NULL with no exception left set when absent. */
KvsPyObject *kvs_py_attr(KvsPyObject *object, const char *name);

/* original(self, *args, **kwargs), new. */
KvsPyObject *kvs_py_call_original(KvsPyObject *original, KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs);

/* The argument at position index (0: after self) or of this name; borrowed; NULL when not given. */
KvsPyObject *kvs_py_argument(KvsPyObject *args, KvsPyObject *kwargs, ssize_t index, const char *name);

#endif
