/* SPDX-License-Identifier: Apache-2.0 */
/* A preload that adds an audit hook which does nothing: what the interpreter itself spends on having one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

static int hook(const char *event, void *args, void *user)
{
	(void)event;
	(void)args;
	(void)user;
	return 0;
}

__attribute__((constructor)) static void begin(void)
{
	int (*add)(int (*)(const char *, void *, void *), void *) =
	        (int (*)(int (*)(const char *, void *, void *), void *))dlsym(RTLD_DEFAULT, "PySys_AddAuditHook");
	if (add)
		add(hook, NULL);
}
