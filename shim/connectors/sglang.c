/* SPDX-License-Identifier: Apache-2.0 */
#include "sglang.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "../../policy/state.h"
#include "../../transport/log.h"

static KvsPyObject *simple_namespace; /* types.SimpleNamespace */
static KvsPyObject *runtime_error;    /* RuntimeError */

/* module.name, new; NULL when absent. */
static KvsPyObject *imported(const char *module_name, const char *name)
{
	KvsPyObject *module = kvs_py.PyImport_ImportModule(module_name);
	KvsPyObject *object = kvs_py_attr(module, name);
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(module);
	return object;
}

bool kvs_sglang_prepare(void)
{
	if (!simple_namespace)
		simple_namespace = imported("types", "SimpleNamespace");
	if (!runtime_error)
		runtime_error = imported("builtins", "RuntimeError");
	return simple_namespace && runtime_error;
}

KvsPyObject *kvs_sglang_namespace(void)
{
	return kvs_py.PyObject_CallObject(simple_namespace, NULL);
}

void kvs_sglang_raise(const char *text)
{
	kvs_py.PyErr_SetString(runtime_error, text);
}

void *kvs_sglang_attached(KvsPyObject *object, const char *attribute)
{
	KvsPyObject *capsule = kvs_py_attr(object, attribute);
	if (!capsule)
		return NULL;
	void *pointer = kvs_py.PyCapsule_GetPointer(capsule, KVS_CAPSULE);
	if (!pointer)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(capsule);
	return pointer;
}

bool kvs_sglang_attach(KvsPyObject *object, const char *attribute, void *pointer, void (*destroy)(KvsPyObject *capsule))
{
	KvsPyObject *capsule = kvs_py.PyCapsule_New(pointer, KVS_CAPSULE, destroy);
	if (!capsule) {
		kvs_py.PyErr_Clear();
		return false;
	}
	bool ok = kvs_py.PyObject_SetAttrString(object, attribute, capsule) == 0;
	if (!ok)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(capsule);
	return ok;
}

bool kvs_sglang_room(KvsPyObject *object, const char *attribute, uint64_t *room_p)
{
	int64_t room = 0;
	if (kvs_py_attr_i64(object, attribute, &room)) {
		*room_p = (uint64_t)room;
		return true;
	}
	*room_p = 0;
	return kvs_py_attr_u64(object, attribute, room_p);
}

void kvs_sglang_record_failure(KvsPyObject *manager, uint64_t room, const char *text)
{
	KvsPyObject *method = kvs_py_attr(manager, "record_failure");
	KvsPyObject *number = kvs_py.PyLong_FromUnsignedLongLong(room);
	KvsPyObject *reason = kvs_py.PyUnicode_FromString(text);
	KvsPyObject *result = NULL;
	if (method && number && reason)
		result = kvs_py.PyObject_CallFunctionObjArgs(method, number, reason, NULL);
	if (!result) {
		kvs_py.PyErr_Clear();
		kvs_log(KVS_LOG_WARN, "room %llu: the connector did not take the reason of its failure: %s",
		        (unsigned long long)room, text);
	}
	kvs_py.Py_DecRef(result);
	kvs_py.Py_DecRef(reason);
	kvs_py.Py_DecRef(number);
	kvs_py.Py_DecRef(method);
}

/* ---- index lists ---- */

/* The bytes of a numpy array, and the width of its elements; NULL: not one of integers. New reference. */
static KvsPyObject *array_bytes(KvsPyObject *object, int *width_p)
{
	KvsPyObject *dtype = kvs_py_attr(object, "dtype");
	char order[8] = "";
	bool known = dtype && kvs_py_attr_text(dtype, "str", order, sizeof order);
	kvs_py.Py_DecRef(dtype);
	if (known && (strcmp(order, "<i4") == 0 || strcmp(order, "<i8") == 0))
		*width_p = order[2] - '0';
	else
		return NULL;
	KvsPyObject *method = kvs_py_attr(object, "tobytes");
	KvsPyObject *bytes = method ? kvs_py.PyObject_CallObject(method, NULL) : NULL;
	kvs_py.Py_DecRef(method);
	if (!bytes)
		kvs_py.PyErr_Clear();
	return bytes;
}

static bool items_from_bytes(KvsPyObject *bytes, int width, int32_t **items_p, uint32_t *count_p, struct kvs_text *text)
{
	char *data = NULL;
	ssize_t size = 0;
	if (kvs_py.PyBytes_AsStringAndSize(bytes, &data, &size) != 0) {
		kvs_py.PyErr_Clear();
		kvs_text_set(text, "the index list has no readable bytes");
		return false;
	}
	size_t count = (size_t)size / (size_t)width;
	if (count > UINT32_MAX) {
		kvs_text_set(text, "the index list has %zu entries, more than a request can have", count);
		return false;
	}
	int32_t *items = malloc(count ? count * sizeof *items : 1);
	if (!items) {
		kvs_text_set(text, "out of memory for %zu item indexes", count);
		return false;
	}
	for (size_t i = 0; i < count; i++) {
		int64_t value = 0;
		if (width == 4) {
			int32_t narrow;
			memcpy(&narrow, data + i * 4, 4);
			value = narrow;
		} else {
			memcpy(&value, data + i * 8, 8);
		}
		if (value < 0 || value > INT32_MAX) {
			kvs_text_set(text, "item index %lld at position %zu is not an index", (long long)value, i);
			free(items);
			return false;
		}
		items[i] = (int32_t)value;
	}
	*items_p = items;
	*count_p = (uint32_t)count;
	return true;
}

static bool items_from_sequence(KvsPyObject *object, int32_t **items_p, uint32_t *count_p, struct kvs_text *text)
{
	KvsPyObject *list = kvs_py.PySequence_List(object);
	if (!list) {
		kvs_py.PyErr_Clear();
		kvs_text_set(text, "the index list is no sequence of integers");
		return false;
	}
	ssize_t count = kvs_py.PyList_Size(list);
	int32_t *items = count >= 0 && count <= UINT32_MAX ? malloc(count ? (size_t)count * sizeof *items : 1) : NULL;
	bool ok = items != NULL;
	if (!ok)
		kvs_text_set(text, "no memory for an index list of %zd entries", count);
	for (ssize_t i = 0; ok && i < count; i++) {
		long long value = kvs_py.PyLong_AsLongLong(kvs_py.PyList_GetItem(list, i));
		if (kvs_py.PyErr_Occurred()) {
			kvs_py.PyErr_Clear();
			kvs_text_set(text, "entry %zd of the index list is no integer", i);
			ok = false;
		} else if (value < 0 || value > INT32_MAX) {
			kvs_text_set(text, "item index %lld at position %zd is not an index", value, i);
			ok = false;
		} else {
			items[i] = (int32_t)value;
		}
	}
	kvs_py.Py_DecRef(list);
	if (!ok) {
		free(items);
		return false;
	}
	*items_p = items;
	*count_p = (uint32_t)count;
	return true;
}

bool kvs_sglang_items(KvsPyObject *object, int32_t **items_p, uint32_t *count_p, struct kvs_text *text)
{
	if (!object || object == kvs_py.none) {
		*items_p = NULL;
		*count_p = 0;
		return true;
	}
	int width = 0;
	KvsPyObject *bytes = array_bytes(object, &width);
	if (!bytes) {
		/* A host tensor has no tobytes, but a numpy view. */
		KvsPyObject *method = kvs_py_attr(object, "numpy");
		KvsPyObject *array = method ? kvs_py.PyObject_CallObject(method, NULL) : NULL;
		kvs_py.Py_DecRef(method);
		if (array)
			bytes = array_bytes(array, &width);
		else
			kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(array);
	}
	if (!bytes)
		return items_from_sequence(object, items_p, count_p, text);
	bool ok = items_from_bytes(bytes, width, items_p, count_p, text);
	kvs_py.Py_DecRef(bytes);
	return ok;
}

/* ---- messages ---- */

/* initial-exec: the general model would need the dynamic loader by name at load time */
static __thread const struct kvs_frame *current_frame __attribute__((tls_model("initial-exec")));

void kvs_sglang_frame_enter(const struct kvs_frame *frame)
{
	current_frame = frame;
}

void kvs_sglang_frame_leave(void)
{
	current_frame = NULL;
}

/* send_multipart of the stand-in socket; self is (the real socket, our frame). */
static KvsPyObject *send_with_frame(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *socket = kvs_py.PyTuple_GetItem(self, 0);
	KvsPyObject *frame = kvs_py.PyTuple_GetItem(self, 1);
	KvsPyObject *method = kvs_py.PyObject_GetAttrString(socket, "send_multipart");
	if (!method)
		return NULL;
	KvsPyObject *result = NULL;
	ssize_t count = kvs_py.PyTuple_Size(args);
	KvsPyObject *message = count > 0 ? kvs_py.PySequence_List(kvs_py.PyTuple_GetItem(args, 0)) : NULL;
	if (count > 0 && !message)
		goto out; /* the exception is what the socket itself would have raised for a message that is no sequence
		           */
	if (!message || kvs_py.PyList_Size(message) > KVS_FRAME_INDEX) {
		static bool told;
		if (message && !told) {
			told = true;
			kvs_log(KVS_LOG_WARN,
			        "this release sends messages of %zd frames, ours would not fit at index %d: peers see "
			        "this "
			        "server as one without kvsplice",
			        kvs_py.PyList_Size(message), KVS_FRAME_INDEX);
		}
		result = kvs_py.PyObject_Call(method, args, kwargs);
		goto out;
	}
	KvsPyObject *empty = kvs_py.PyBytes_FromStringAndSize("", 0);
	bool ok = empty != NULL;
	while (ok && kvs_py.PyList_Size(message) < KVS_FRAME_INDEX)
		ok = kvs_py.PyList_Append(message, empty) == 0;
	ok = ok && kvs_py.PyList_Append(message, frame) == 0;
	kvs_py.Py_DecRef(empty);
	KvsPyObject *with_frame = ok ? kvs_py.PyTuple_New(count) : NULL;
	if (!with_frame)
		goto out;
	for (ssize_t i = 0; i < count; i++) {
		KvsPyObject *item = i == 0 ? message : kvs_py.PyTuple_GetItem(args, i);
		kvs_py.Py_IncRef(item);
		kvs_py.PyTuple_SetItem(with_frame, i, item);
	}
	result = kvs_py.PyObject_Call(method, with_frame, kwargs);
	kvs_py.Py_DecRef(with_frame);
out:
	kvs_py.Py_DecRef(message);
	kvs_py.Py_DecRef(method);
	return result;
}

static struct kvs_py_method_def send_with_frame_def = {
        .name = "send_multipart",
        .function = send_with_frame,
        .flags = KVS_PY_METH_VARARGS | KVS_PY_METH_KEYWORDS,
};

/* An object whose send_multipart adds the frame, new; NULL with the exception set. */
static KvsPyObject *stand_in(KvsPyObject *socket, const struct kvs_frame *frame)
{
	KvsPyObject *bytes = kvs_py.PyBytes_FromStringAndSize((const char *)frame->bytes, (ssize_t)frame->size);
	KvsPyObject *pair = bytes ? kvs_py.PyTuple_New(2) : NULL;
	if (!pair) {
		kvs_py.Py_DecRef(bytes);
		return NULL;
	}
	kvs_py.Py_IncRef(socket);
	kvs_py.PyTuple_SetItem(pair, 0, socket);
	kvs_py.PyTuple_SetItem(pair, 1, bytes);
	KvsPyObject *function = kvs_py.PyCFunction_NewEx(&send_with_frame_def, pair, NULL);
	kvs_py.Py_DecRef(pair);
	KvsPyObject *object = function ? kvs_sglang_namespace() : NULL;
	if (object && kvs_py.PyObject_SetAttrString(object, "send_multipart", function) != 0) {
		kvs_py.Py_DecRef(object);
		object = NULL;
	}
	kvs_py.Py_DecRef(function);
	return object;
}

KvsPyObject *kvs_sglang_connect(KvsPyObject *original, KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	KvsPyObject *pair = kvs_py_call_original(original, self, args, kwargs);
	if (!pair || !current_frame)
		return pair;
	KvsPyObject *parts = kvs_py.PySequence_Tuple(pair);
	kvs_py.Py_DecRef(pair);
	if (!parts || kvs_py.PyTuple_Size(parts) != 2)
		return parts;
	KvsPyObject *socket = stand_in(kvs_py.PyTuple_GetItem(parts, 0), current_frame);
	KvsPyObject *result = socket ? kvs_py.PyTuple_New(2) : NULL;
	if (result) {
		KvsPyObject *lock = kvs_py.PyTuple_GetItem(parts, 1);
		kvs_py.Py_IncRef(lock);
		kvs_py.PyTuple_SetItem(result, 0, socket);
		kvs_py.PyTuple_SetItem(result, 1, lock);
	} else {
		kvs_py.Py_DecRef(socket);
	}
	kvs_py.Py_DecRef(parts);
	return result;
}

/* Our frames begin with one of two magics; a frame there that is not ours belongs to somebody else. */
static const uint8_t generation_magic[8] = {'k', 'v', 's', 'R', 'O', 'O', 'M', 1};

static bool is_our_frame(const void *data, size_t size)
{
	return kvs_record_is(data, size) || (size >= sizeof generation_magic && memcmp(data, generation_magic, 7) == 0);
}

KvsPyObject *kvs_sglang_take_frame(KvsPyObject *message, struct kvs_frame *frame_p)
{
	ssize_t count = kvs_py.PySequence_Size(message);
	if (count < KVS_FRAME_INDEX) {
		if (count < 0)
			kvs_py.PyErr_Clear();
		return NULL;
	}
	KvsPyObject *last = kvs_py.PySequence_GetItem(message, count - 1);
	char *data = NULL;
	ssize_t size = 0;
	bool ours = last && kvs_py.PyBytes_AsStringAndSize(last, &data, &size) == 0 && is_our_frame(data, (size_t)size);
	KvsPyObject *rest = NULL;
	if (ours) {
		/* A frame longer than any record is cut: its reader then finds it malformed. */
		frame_p->size = (size_t)size < sizeof frame_p->bytes ? (size_t)size : sizeof frame_p->bytes;
		memcpy(frame_p->bytes, data, frame_p->size);
		rest = kvs_py.PyList_New(count - 1);
		for (ssize_t i = 0; rest && i < count - 1; i++) {
			KvsPyObject *item = kvs_py.PySequence_GetItem(message, i);
			if (!item || kvs_py.PyList_SetItem(rest, i, item) != 0) {
				kvs_py.Py_DecRef(rest);
				rest = NULL;
			}
		}
	}
	if (kvs_py.PyErr_Occurred())
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(last);
	return rest;
}

void kvs_sglang_generation_frame(uint64_t generation, struct kvs_frame *frame_p)
{
	memcpy(frame_p->bytes, generation_magic, sizeof generation_magic);
	memcpy(frame_p->bytes + sizeof generation_magic, &generation, sizeof generation);
	frame_p->size = sizeof generation_magic + sizeof generation;
}

bool kvs_sglang_generation(const struct kvs_frame *frame, uint64_t *generation_p)
{
	if (frame->size < sizeof generation_magic + sizeof *generation_p ||
	    memcmp(frame->bytes, generation_magic, sizeof generation_magic) != 0)
		return false;
	memcpy(generation_p, frame->bytes + sizeof generation_magic, sizeof *generation_p);
	return true;
}
