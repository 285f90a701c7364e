/* SPDX-License-Identifier: Apache-2.0 */
/* Ask the loader for symbols in every way there is, and print which file each one comes from. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const char *const names[] = {"puts",      "dlsym", "malloc", "cuInit", "cuGetProcAddress", "PySys_AddAuditHook",
                                    "PyList_New"};

static const char *file_of(const void *address)
{
	Dl_info info;
	if (!address)
		return "none";
	if (!dladdr(address, &info) || !info.dli_fname)
		return "unknown";
	const char *slash = strrchr(info.dli_fname, '/');
	return slash ? slash + 1 : info.dli_fname;
}

static void show(const char *where, void *handle)
{
	for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
		void *address = dlsym(handle, names[i]);
		const char *message = dlerror();
		printf("%s %s: %s, %s\n", where, names[i], file_of(address), message ? message : "no error");
	}
}

int main(int count, char **arguments)
{
	show("default", RTLD_DEFAULT);
	show("next", RTLD_NEXT);
	show("program", dlopen(NULL, RTLD_NOW));
	for (int i = 1; i < count; i++) {
		void *handle = dlopen(arguments[i], RTLD_NOW | RTLD_GLOBAL);
		if (!handle) {
			printf("%s: %s\n", arguments[i], dlerror());
			continue;
		}
		show(arguments[i], handle);
		show("default", RTLD_DEFAULT);
		dlclose(handle);
	}
	return 8;
}
