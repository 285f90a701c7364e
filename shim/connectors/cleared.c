/* SPDX-License-Identifier: Apache-2.0 */
#include "cleared.h"

#define ATTRIBUTE "_kvsplice_cleared" /* of a manager: a list of dictionaries */
#define KEPT      64                  /* a worker holds one room at a time, and there are fewer workers than this */

/* A list of the last KEPT - 1 entries and this one; new. */
static KvsPyObject *with(KvsPyObject *list, KvsPyObject *infos)
{
	KvsPyObject *longer = kvs_py.PyList_New(0);
	ssize_t size = list ? kvs_py.PyList_Size(list) : 0;
	bool ok = longer != NULL;
	for (ssize_t i = size < KEPT ? 0 : size - KEPT + 1; ok && i < size; i++)
		ok = kvs_py.PyList_Append(longer, kvs_py.PyList_GetItem(list, i)) == 0;
	if (ok && kvs_py.PyList_Append(longer, infos) == 0)
		return longer;
	kvs_py.Py_DecRef(longer);
	return NULL;
}

void kvs_cleared_keep(KvsPyObject *sender)
{
	KvsPyObject *manager = kvs_py_attr(sender, "kv_mgr");
	KvsPyObject *number = kvs_py_attr(sender, "bootstrap_room");
	KvsPyObject *rooms = manager ? kvs_py_attr(manager, "transfer_infos") : NULL;
	KvsPyObject *infos = rooms && number ? kvs_py.PyObject_GetItem(rooms, number) : NULL;
	if (infos) {
		KvsPyObject *list = kvs_cleared_list(manager);
		KvsPyObject *longer = with(list, infos);
		if (longer)
			kvs_py.PyObject_SetAttrString(manager, ATTRIBUTE, longer);
		kvs_py.Py_DecRef(longer);
		kvs_py.Py_DecRef(list);
	}
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(infos);
	kvs_py.Py_DecRef(rooms);
	kvs_py.Py_DecRef(number);
	kvs_py.Py_DecRef(manager);
}

KvsPyObject *kvs_cleared_list(KvsPyObject *manager)
{
	return kvs_py_attr(manager, ATTRIBUTE);
}
