/* SPDX-License-Identifier: Apache-2.0 */
#include "signature.h"

#include <string.h>

#define ANY_MORE        "..."
#define NAME_SIZE       128
#define MOST_PARAMETERS 512 /* characters of one list of names */
#define MOST_WRAPPED    16  /* decorators on one function; more is a cycle */

/* What lies under the decorators. New; NULL: no Python function. */
static KvsPyObject *innermost(KvsPyObject *function)
{
	kvs_py.Py_IncRef(function);
	for (int i = 0; i < MOST_WRAPPED; i++) {
		KvsPyObject *wrapped = kvs_py_attr(function, "__wrapped__");
		if (!wrapped)
			return function;
		kvs_py.Py_DecRef(function);
		function = wrapped;
	}
	kvs_py.Py_DecRef(function);
	return NULL;
}

/* len(function.<name>), 0 when it is None or absent. */
static int64_t length_of(KvsPyObject *function, const char *name)
{
	KvsPyObject *value = kvs_py_attr(function, name);
	int64_t size = value && value != kvs_py.none ? kvs_py.PyObject_Size(value) : 0;
	if (size < 0) {
		kvs_py.PyErr_Clear();
		size = 0;
	}
	kvs_py.Py_DecRef(value);
	return size;
}

static bool name_at(KvsPyObject *names, int64_t index, char *buffer, size_t size)
{
	KvsPyObject *name = kvs_py.PySequence_GetItem(names, (ssize_t)index);
	if (!name)
		kvs_py.PyErr_Clear();
	bool ok = kvs_py_text(name, buffer, size);
	kvs_py.Py_DecRef(name);
	return ok;
}

/* The listed names against the first ones of names; how many are listed, or -1. */
static int64_t match_names(KvsPyObject *names, int64_t count, const char *parameters, struct kvs_text *text)
{
	int64_t index = 0;
	for (const char *at = parameters + strspn(parameters, " "); *at && strcmp(at, ANY_MORE) != 0; index++) {
		int size = (int)strcspn(at, " ");
		char actual[NAME_SIZE];
		if (index >= count) {
			kvs_text_set(text, "takes %lld parameters, without '%.*s'", (long long)count, size, at);
			return -1;
		}
		if (!name_at(names, index, actual, sizeof actual))
			strcpy(actual, "?");
		if (strlen(actual) != (size_t)size || strncmp(actual, at, (size_t)size) != 0) {
			kvs_text_set(text, "parameter %lld is '%s', expected '%.*s'", (long long)index + 1, actual,
			             size, at);
			return -1;
		}
		at += size;
		at += strspn(at, " ");
	}
	return index;
}

static bool rest_has_defaults(KvsPyObject *function, KvsPyObject *code, KvsPyObject *names, int64_t listed,
                              int64_t count, struct kvs_text *text)
{
	int64_t keyword_only = 0;
	char name[NAME_SIZE] = "?";
	if (!kvs_py_attr_i64(code, "co_kwonlyargcount", &keyword_only))
		return false;
	int64_t first_default = count - length_of(function, "__defaults__");
	if (first_default > listed) {
		name_at(names, listed, name, sizeof name);
		kvs_text_set(text, "has a further parameter '%s' without a default", name);
		return false;
	}
	if (keyword_only > length_of(function, "__kwdefaults__")) {
		kvs_text_set(text, "has a further keyword-only parameter without a default");
		return false;
	}
	return true;
}

static bool code_fits(KvsPyObject *function, KvsPyObject *code, const char *parameters, struct kvs_text *text)
{
	int64_t count = 0;
	KvsPyObject *names = kvs_py_attr(code, "co_varnames");
	bool ok = false;
	if (names && kvs_py_attr_i64(code, "co_argcount", &count)) {
		int64_t listed = match_names(names, count, parameters, text);
		bool any_more = strstr(parameters, ANY_MORE) != NULL;
		ok = listed >= 0 && (any_more || rest_has_defaults(function, code, names, listed, count, text));
	}
	kvs_py.Py_DecRef(names);
	return ok;
}

/* The lists of alternatives one after the other, each copied out, since it is read as a whole string. */
static bool any_fits(KvsPyObject *function, KvsPyObject *code, const char *alternatives, struct kvs_text *text)
{
	char one[MOST_PARAMETERS];
	bool ok = false;
	for (const char *at = alternatives; !ok && *at;) {
		size_t size = strcspn(at, "|");
		if (size >= sizeof one) {
			kvs_text_set(text, "is expected with more parameters than can be compared");
			return false;
		}
		memcpy(one, at, size);
		one[size] = '\0';
		ok = code_fits(function, code, one, text);
		at += size + (at[size] == '|');
	}
	return ok;
}

bool kvs_signature_fits(KvsPyObject *function, const char *parameters, struct kvs_text *text)
{
	kvs_text_set(text, "is no Python function");
	KvsPyObject *inner = innermost(function);
	KvsPyObject *code = kvs_py_attr(inner, "__code__");
	bool ok = code && any_fits(inner, code, parameters, text);
	kvs_py.Py_DecRef(code);
	kvs_py.Py_DecRef(inner);
	return ok;
}

ssize_t kvs_signature_index(KvsPyObject *function, const char *name)
{
	int64_t count = 0;
	ssize_t found = -1;
	KvsPyObject *inner = innermost(function);
	KvsPyObject *code = kvs_py_attr(inner, "__code__");
	KvsPyObject *names = code ? kvs_py_attr(code, "co_varnames") : NULL;
	if (names && kvs_py_attr_i64(code, "co_argcount", &count)) {
		char actual[NAME_SIZE];
		for (int64_t i = 0; found < 0 && i < count; i++)
			if (name_at(names, i, actual, sizeof actual) && strcmp(actual, name) == 0)
				found = (ssize_t)i;
	}
	kvs_py.Py_DecRef(names);
	kvs_py.Py_DecRef(code);
	kvs_py.Py_DecRef(inner);
	return found;
}
