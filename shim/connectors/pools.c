/* SPDX-License-Identifier: Apache-2.0 */
#include "pools.h"

#include <string.h>

#include "../python/api.h"

#define FRAMES 32 /* between the manager's constructor and _init_kv_manager there are a few, of subclasses */

/* object[key], new; NULL when absent. */
static KvsPyObject *item(KvsPyObject *object, const char *key)
{
	KvsPyObject *name = kvs_py.PyUnicode_FromString(key);
	KvsPyObject *found = object && name ? kvs_py.PyObject_GetItem(object, name) : NULL;
	if (!found)
		kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(name);
	return found;
}

/* Is this frame one of the function in which both roles make their manager? */
static bool makes_manager(KvsPyObject *frame)
{
	char name[32] = "";
	KvsPyObject *code = kvs_py_attr(frame, "f_code");
	bool known = code && kvs_py_attr_text(code, "co_name", name, sizeof name);
	kvs_py.Py_DecRef(code);
	return known && strcmp(name, "_init_kv_manager") == 0;
}

/* The pool of the manager that is being made, new; NULL: not found. */
static KvsPyObject *find_pool(void)
{
	KvsPyObject *sys = kvs_py.PyImport_ImportModule("sys");
	KvsPyObject *getframe = sys ? kvs_py_attr(sys, "_getframe") : NULL;
	KvsPyObject *frame = getframe ? kvs_py.PyObject_CallObject(getframe, NULL) : NULL;
	KvsPyObject *pool = NULL;
	for (int i = 0; i < FRAMES && frame && frame != kvs_py.none && !pool; i++) {
		if (makes_manager(frame)) {
			KvsPyObject *locals = kvs_py_attr(frame, "f_locals");
			KvsPyObject *queue = item(locals, "self");
			pool = queue ? kvs_py_attr(queue, "token_to_kv_pool") : NULL;
			kvs_py.Py_DecRef(queue);
			kvs_py.Py_DecRef(locals);
		}
		KvsPyObject *back = kvs_py_attr(frame, "f_back");
		kvs_py.Py_DecRef(frame);
		frame = back;
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(frame);
	kvs_py.Py_DecRef(getframe);
	kvs_py.Py_DecRef(sys);
	return pool;
}

static bool number_at(KvsPyObject *sequence, ssize_t position, uint64_t *value_p)
{
	KvsPyObject *object = sequence ? kvs_py.PySequence_GetItem(sequence, position) : NULL;
	bool ok = object != NULL;
	if (ok)
		*value_p = kvs_py.PyLong_AsUnsignedLongLong(object);
	if (kvs_py.PyErr_Occurred()) {
		kvs_py.PyErr_Clear();
		ok = false;
	}
	kvs_py.Py_DecRef(object);
	return ok;
}

/* layers_mapping: {global layer: (place among its kind, is it one of the sliding window's)}. False: not like that. */
static bool layers_of_kind(KvsPyObject *mapping, bool window, int32_t layers_p[KVS_MAX_TENSORS], uint32_t *count_p)
{
	KvsPyObject *key, *value;
	ssize_t position = 0;
	uint32_t count = 0;
	for (uint32_t i = 0; i < KVS_MAX_TENSORS; i++)
		layers_p[i] = KVS_NO_LAYER;
	while (kvs_py.PyDict_Next(mapping, &position, &key, &value)) {
		uint64_t place = 0, of_window = 0;
		unsigned long long layer = kvs_py.PyLong_AsUnsignedLongLong(key);
		if (kvs_py.PyErr_Occurred() || layer > INT32_MAX || !number_at(value, 0, &place) ||
		    !number_at(value, 1, &of_window) || of_window > 1) {
			kvs_py.PyErr_Clear();
			return false;
		}
		if ((of_window == 1) != window)
			continue;
		if (place >= KVS_MAX_TENSORS || layers_p[place] != KVS_NO_LAYER)
			return false;
		layers_p[place] = (int32_t)layer;
		count++;
	}
	for (uint32_t i = 0; i < count; i++)
		if (layers_p[i] == KVS_NO_LAYER)
			return false;
	*count_p = count;
	return true;
}

/* Are these the component's first buffers? A draft model's follow those of the target. */
static bool are_first_buffers(const struct kvs_component *c, KvsPyObject *addresses, uint32_t count)
{
	if (kvs_py.PySequence_Size(addresses) != (ssize_t)count || count > c->tensor_count)
		return false;
	for (uint32_t i = 0; i < count; i++) {
		uint64_t address = 0;
		if (c->tensors[i].layer_id != KVS_NO_LAYER || !number_at(addresses, i, &address) ||
		    address != c->tensors[i].address)
			return false;
	}
	return true;
}

/* method: of the pool, returns (addresses, lengths, item lengths): K of each layer, then V of each. */
static void name_layers(struct kvs_component *c, KvsPyObject *pool, KvsPyObject *mapping, const char *method,
                        bool window)
{
	static int32_t layers[KVS_MAX_TENSORS]; /* the interpreter lock guards it: nothing below gives it up */
	uint32_t count = 0;
	KvsPyObject *function = kvs_py_attr(pool, method);
	KvsPyObject *infos = function ? kvs_py.PyObject_CallObject(function, NULL) : NULL;
	KvsPyObject *addresses = infos ? kvs_py.PySequence_GetItem(infos, 0) : NULL;
	if (addresses && layers_of_kind(mapping, window, layers, &count) &&
	    are_first_buffers(c, addresses, 2 * count)) {
		for (uint32_t i = 0; i < 2 * count; i++)
			c->tensors[i].layer_id = layers[i % count];
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(addresses);
	kvs_py.Py_DecRef(infos);
	kvs_py.Py_DecRef(function);
}

void kvs_pools_layer_ids(struct kvs_layout *layout)
{
	KvsPyObject *pool = find_pool();
	KvsPyObject *mapping = pool ? kvs_py_attr(pool, "layers_mapping") : NULL;
	/* Not a dictionary: it has no next item. */
	if (mapping && kvs_py.PyDict_Size(mapping) > 0) {
		for (uint32_t c = 0; c < layout->component_count; c++) {
			struct kvs_component *component = &layout->components[c];
			if (c == KVS_COMPONENT_KV)
				name_layers(component, pool, mapping, "get_contiguous_buf_infos", false);
			else if (strcmp(component->type, "swa") == 0)
				name_layers(component, pool, mapping, "get_state_buf_infos", true);
		}
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(mapping);
	kvs_py.Py_DecRef(pool);
}
