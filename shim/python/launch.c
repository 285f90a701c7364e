/* SPDX-License-Identifier: Apache-2.0 */
/*
 * multiprocessing starts its processes by a call without an event of its own, with the environment as it is. So the
 * changes of the environment are watched as well as the calls that are given one. A change is reported when it is made:
 * what makes such changes (torch_memory_saver) makes them around a spawn.
 */
#define _GNU_SOURCE
#include "launch.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "../../transport/log.h"
#include "../connectors/connector.h"
#include "../log.h"

#define VARIABLE "LD_PRELOAD"

/* event, function: what it does with the event's arguments */
#define EVENT_TABLE(X) \
	X("os.putenv", on_putenv) \
	X("os.unsetenv", on_unsetenv) \
	X("os.exec", on_start) \
	X("os.posix_spawn", on_start) \
	X("subprocess.Popen", on_popen)

static struct {
	char name[NAME_MAX + 1]; /* of the file that this library was loaded from */
	dev_t device;
	ino_t inode;
	bool listed; /* in LD_PRELOAD, when this process began */
} self;

static KvsPyObject *modules; /* sys.modules, which the hook keeps */
static atomic_bool changed;  /* the environment no longer lists us, and this was no server then */
static atomic_bool said;

/* ---- the list ---- */

static const char *base_of(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash ? slash + 1 : path;
}

/* A name of a file that is not ours may be another build of this library: that counts. */
static bool is_us(const char *entry)
{
	bool same_name = strcmp(base_of(entry), self.name) == 0;
	/* The loader searches for the one, and expands the other: both are beyond us. */
	if (!strchr(entry, '/') || strchr(entry, '$'))
		return same_name;
	struct stat status;
	if (stat(entry, &status) != 0)
		return false;
	return same_name || (status.st_dev == self.device && status.st_ino == self.inode);
}

/* The loader separates at colons and spaces. */
static bool lists_us(const char *list)
{
	char entry[PATH_MAX];
	for (const char *at = list ? list : ""; *at; at += strspn(at, ": ")) {
		size_t size = strcspn(at, ": ");
		if (size && size < sizeof entry) {
			memcpy(entry, at, size);
			entry[size] = '\0';
			if (is_us(entry))
				return true;
		}
		at += size;
	}
	return false;
}

void kvs_launch_begin(void)
{
	Dl_info info;
	struct stat status;
	if (!getenv(VARIABLE) || !dladdr(&self, &info) || !info.dli_fname || stat(info.dli_fname, &status) != 0)
		return;
	const char *name = base_of(info.dli_fname);
	size_t size = strlen(name) + 1;
	if (size > sizeof self.name)
		return;
	memcpy(self.name, name, size);
	self.device = status.st_dev;
	self.inode = status.st_ino;
	self.listed = lists_us(getenv(VARIABLE));
}

/* ---- what is said, and where ---- */

/* Has the package of any connector been imported? Then this is a server, or starts one. */
static bool is_server(void)
{
	for (size_t i = 0; i < kvs_connector_count; i++) {
		const char *module = kvs_connectors[i]->module;
		char package[64];
		size_t size = strcspn(module, ".");
		if (size >= sizeof package)
			continue;
		memcpy(package, module, size);
		package[size] = '\0';
		if (kvs_py.PyDict_GetItemString(modules, package))
			return true;
	}
	return false;
}

static void say(const char *list)
{
	if (atomic_exchange(&said, true))
		return;
	kvs_log_install();
	kvs_log_write(KVS_LOG_WARN, "launch",
	              VARIABLE " of what this process starts no longer has %s: those processes run without kvsplice. "
	                       "Whatever changes " VARIABLE " has to keep it in the list (torch_memory_saver does from "
	                       "0.0.10 on). The list now: %s",
	              self.name, *list ? list : "(empty)");
}

/* Children are about to get this list. */
static void check(const char *list)
{
	if (atomic_load_explicit(&said, memory_order_relaxed) || lists_us(list))
		return;
	if (is_server())
		say(list ? list : "");
}

/* ---- events ---- */

/* The characters of a str or bytes, as long as the object lives; NULL: it is neither. */
static const char *text_of(KvsPyObject *object)
{
	char *bytes = NULL;
	const char *text = NULL;
	ssize_t size = 0;
	if (object && kvs_py.PyBytes_AsStringAndSize(object, &bytes, &size) == 0)
		return bytes;
	kvs_py.PyErr_Clear();
	text = object ? kvs_py.PyUnicode_AsUTF8AndSize(object, &size) : NULL;
	kvs_py.PyErr_Clear();
	return text;
}

/* Borrowed; NULL when there are not as many. */
static KvsPyObject *argument(KvsPyObject *args, ssize_t index)
{
	return kvs_py_argument(args, NULL, index, NULL);
}

static void on_change(KvsPyObject *args, const char *list)
{
	const char *name = text_of(argument(args, 0));
	if (!name || strcmp(name, VARIABLE) != 0)
		return;
	bool kept = lists_us(list);
	atomic_store(&changed, !kept);
	check(list);
}

/* (name, value) */
static void on_putenv(KvsPyObject *args)
{
	const char *list = text_of(argument(args, 1));
	if (list)
		on_change(args, list);
}

/* (name) */
static void on_unsetenv(KvsPyObject *args)
{
	on_change(args, "");
}

/* Only a Python process can be a worker: a compiler that is started with a clean environment is no loss. */
static bool is_python(KvsPyObject *program)
{
	char own[PATH_MAX];
	const char *path = text_of(program);
	if (!path)
		return false;
	if (strncmp(base_of(path), "python", strlen("python")) == 0)
		return true;
	KvsPyObject *sys = kvs_py.PyDict_GetItemString(modules, "sys");
	return kvs_py_attr_text(sys, "executable", own, sizeof own) && strcmp(path, own) == 0;
}

/* Is this the process's own environment, in the shape that Python gives it? */
static bool is_own(KvsPyObject *environment)
{
	if (environment == kvs_py.none)
		return true;
	KvsPyObject *os = kvs_py.PyDict_GetItemString(modules, "os");
	KvsPyObject *own = kvs_py_attr(os, "environ");
	kvs_py.Py_DecRef(own);
	return own == environment;
}

/* The entry of a dict under the name as str or bytes, borrowed. *known_p false: it is no dict. */
static KvsPyObject *entry_of(KvsPyObject *environment, bool *known_p)
{
	KvsPyObject *keys[] = {kvs_py.PyUnicode_FromString(VARIABLE),
	                       kvs_py.PyBytes_FromStringAndSize(VARIABLE, (ssize_t)strlen(VARIABLE))};
	KvsPyObject *entry = NULL;
	*known_p = true;
	for (size_t i = 0; i < 2; i++) {
		if (keys[i] && !entry)
			entry = kvs_py.PyDict_GetItemWithError(environment, keys[i]);
		if (!keys[i] || kvs_py.PyErr_Occurred())
			*known_p = false;
		kvs_py.PyErr_Clear();
		kvs_py.Py_DecRef(keys[i]);
	}
	return entry;
}

static void on_program(KvsPyObject *program, KvsPyObject *environment)
{
	if (!environment || !is_python(program))
		return;
	if (is_own(environment)) {
		check(getenv(VARIABLE));
		return;
	}
	bool known = false;
	KvsPyObject *entry = entry_of(environment, &known);
	const char *list = entry ? text_of(entry) : "";
	if (known && list)
		check(list);
}

/* (path, arguments, environment) */
static void on_start(KvsPyObject *args)
{
	on_program(argument(args, 0), argument(args, 2));
}

/* (executable, arguments, folder, environment) */
static void on_popen(KvsPyObject *args)
{
	on_program(argument(args, 0), argument(args, 3));
}

static const struct {
	const char *event;
	void (*function)(KvsPyObject *args);
} events[] = {
#define ROW(name, handler) {name, handler},
        EVENT_TABLE(ROW)
#undef ROW
};

void kvs_launch_event(const char *event, KvsPyObject *args, KvsPyObject *modules_now)
{
	if (!self.listed)
		return;
	int saved = errno;
	modules = modules_now;
	for (size_t i = 0; i < sizeof events / sizeof *events; i++)
		if (strcmp(event, events[i].event) == 0)
			events[i].function(args);
	errno = saved;
}

void kvs_launch_look_again(KvsPyObject *modules_now)
{
	modules = modules_now;
	if (!atomic_load_explicit(&changed, memory_order_relaxed) || !is_server())
		return;
	int saved = errno;
	atomic_store(&changed, false);
	check(getenv(VARIABLE));
	errno = saved;
}
