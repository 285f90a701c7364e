/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The audit hook. On the event "import" of a connector module the module is imported from here, its classes are
 * patched, and the interpreter's own import then finds the finished module. Importing one by a way that raises no such
 * event (importlib.import_module) is noticed at the next event, by the size of sys.modules.
 *
 * Threads: everything runs under the interpreter lock, and no lock of ours is held. A module is idle, being imported by
 * some threads (a bit in each one's own set), or done.
 */
#include "hook.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "../../transport/log.h"
#include "../connectors/connector.h"
#include "../log.h"
#include "../options.h"
#include "audit_block.h"
#include "finder.h"
#include "launch.h"
#include "patch.h"

struct watched {
	struct kvs_connector *connector;
	ssize_t name_size;
	atomic_bool done;
};

static struct watched watched[KVS_MAX_CONNECTORS];
static size_t watched_count;

/* sys.modules of interpreter 0, once seen; a strong reference for the life of the process. */
static _Atomic(KvsPyObject *) modules;
static _Atomic ssize_t modules_size; /* when last looked through; -1: look again */

/* The watched modules that this thread is importing from within the hook: their own events are let through. */
static __thread uint32_t importing __attribute__((tls_model("initial-exec")));

/* Only the first interpreter is ours: a class or a cached object of one must not meet another. */
static bool in_main_interpreter(void)
{
	return kvs_py.PyInterpreterState_GetID(kvs_py.PyInterpreterState_Get()) == 0;
}

/*
 * Is this a build without the interpreter lock (PEP 703)? Such builds have a "t" in sys.abiflags. What we do under the
 * lock would need other means there.
 */
static bool is_free_threaded(void)
{
	char flags[16];
	KvsPyObject *sys = kvs_py.PyDict_GetItemString(kvs_py.PyImport_GetModuleDict(), "sys");
	return kvs_py_attr_text(sys, "abiflags", flags, sizeof flags) && strchr(flags, 't');
}

/* A connector is here, so this process is a server: from now on we may speak. */
static void patch(struct watched *module, KvsPyObject *object)
{
	kvs_log_install();
	kvs_options_report();
	if (is_free_threaded()) {
		if (!atomic_exchange(&module->done, true))
			kvs_log_write(KVS_LOG_WARN, "hook",
			              "%s is left as it was: this Python was built without the interpreter lock",
			              module->connector->name);
		return;
	}
	kvs_patch(module->connector, object, &module->done);
}

/* ---- modules that came by a way without an event ---- */

static bool is_initializing(KvsPyObject *module)
{
	KvsPyObject *spec = kvs_py_attr(module, "__spec__");
	bool yes = kvs_py_attr_true(spec, "_initializing");
	kvs_py.Py_DecRef(spec);
	return yes;
}

/* Patch the module if it is there and whole. True: it is on its way, and some thread has to look at it again. */
static bool look_at(size_t i, KvsPyObject *dict)
{
	struct watched *module = &watched[i];
	if (atomic_load(&module->done))
		return false;
	if (importing & 1U << i)
		return true;
	KvsPyObject *object = kvs_py.PyDict_GetItemString(dict, module->connector->module);
	if (!object || object == kvs_py.none)
		return false;
	kvs_py.Py_IncRef(object);
	bool unfinished = is_initializing(object);
	if (!unfinished)
		patch(module, object);
	kvs_py.Py_DecRef(object);
	return unfinished;
}

static void catch_up(void)
{
	KvsPyObject *dict = atomic_load_explicit(&modules, memory_order_acquire);
	if (!dict)
		return;
	ssize_t size = kvs_py.PyDict_Size(dict);
	if (size == atomic_load_explicit(&modules_size, memory_order_relaxed) || !in_main_interpreter())
		return;
	atomic_store_explicit(&modules_size, size, memory_order_relaxed);
	kvs_launch_look_again(dict);
	bool again = false;
	for (size_t i = 0; i < watched_count; i++)
		again |= look_at(i, dict);
	if (again)
		atomic_store_explicit(&modules_size, -1, memory_order_relaxed);
}

/* ---- imports ---- */

/* Which watched module is this? -1: none. */
static int which(const char *name, ssize_t size)
{
	for (size_t i = 0; i < watched_count; i++)
		if (size == watched[i].name_size && memcmp(name, watched[i].connector->module, (size_t)size) == 0)
			return (int)i;
	return -1;
}

static int which_object(KvsPyObject *name)
{
	ssize_t size = 0;
	const char *text = name ? kvs_py.PyUnicode_AsUTF8AndSize(name, &size) : NULL;
	if (!text) {
		kvs_py.PyErr_Clear();
		return -1;
	}
	return which(text, size);
}

static bool is_importing(KvsPyObject *name)
{
	int i = which_object(name);
	return i >= 0 && importing & 1U << i;
}

static void has_run(KvsPyObject *module)
{
	KvsPyObject *name = kvs_py_attr(module, "__name__");
	int i = which_object(name);
	if (i >= 0 && !atomic_load(&watched[i].done))
		patch(&watched[i], module);
	kvs_py.Py_DecRef(name);
}

static const struct kvs_finder finder = {.wanted = is_importing, .loaded = has_run};

/* 0: go on with the import; -1: it failed, the exception is set, and doing it again would run the module twice. */
static int import_and_patch(int i, KvsPyObject *name)
{
	if (atomic_load(&watched[i].done) || importing & 1U << i || !in_main_interpreter())
		return 0;
	importing |= 1U << i;
	bool entered = kvs_finder_enter(&finder);
	KvsPyObject *top = kvs_py.PyImport_ImportModuleLevelObject(name, NULL, NULL, NULL, 0);
	if (entered)
		kvs_finder_leave();
	importing &= ~(1U << i);
	if (!top)
		return -1;
	kvs_py.Py_DecRef(top);
	/* Still to do where the loader could not be wrapped, or another thread was there first without an event. */
	KvsPyObject *module = kvs_py.PyDict_GetItemWithError(kvs_py.PyImport_GetModuleDict(), name);
	kvs_py.PyErr_Clear();
	if (module && !atomic_load(&watched[i].done)) {
		kvs_py.Py_IncRef(module);
		patch(&watched[i], module);
		kvs_py.Py_DecRef(module);
	}
	return 0;
}

static int on_import(KvsPyObject *args)
{
	KvsPyObject *name = kvs_py.PyTuple_GetItem(args, 0);
	int i = which_object(name);
	if (!atomic_load_explicit(&modules, memory_order_relaxed) && in_main_interpreter()) {
		KvsPyObject *dict = kvs_py.PyImport_GetModuleDict();
		kvs_py.Py_IncRef(dict);
		atomic_store_explicit(&modules, dict, memory_order_release);
	}
	return i < 0 ? 0 : import_and_patch(i, name);
}

/* By the first letters, which is quick: "open" and "import" are what comes often. */
static bool is_about_processes(const char *event)
{
	return (event[0] == 'o' && event[1] == 's') || (event[0] == 's' && event[1] == 'u');
}

static void on_processes(const char *event, KvsPyObject *args)
{
	KvsPyObject *dict = atomic_load_explicit(&modules, memory_order_acquire);
	if (dict && in_main_interpreter())
		kvs_launch_event(event, args, dict);
}

static int on_event(const char *event, KvsPyObject *args, void *user)
{
	(void)user;
	/* Events of the runtime itself come before there is an interpreter, and after it has gone. */
	if (event[0] == 'c' && strncmp(event, "cpython.", strlen("cpython.")) == 0) {
		if (strcmp(event, "cpython._PySys_ClearAuditHooks") == 0)
			kvs_audit_block_clearing();
		return 0;
	}
	int result = 0;
	if (event[0] == 'i' && strcmp(event, "import") == 0)
		result = on_import(args);
	else if (is_about_processes(event))
		on_processes(event, args);
	if (result == 0)
		catch_up();
	return result;
}

void kvs_hook_install(void)
{
	for (size_t i = 0; i < kvs_connector_count && i < KVS_MAX_CONNECTORS; i++) {
		watched[i].connector = kvs_connectors[i];
		watched[i].name_size = (ssize_t)strlen(kvs_connectors[i]->module);
		watched_count = i + 1;
	}
	kvs_launch_begin();
	kvs_audit_block_add(on_event);
}
