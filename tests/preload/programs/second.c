/* SPDX-License-Identifier: Apache-2.0 */
/* Another preloaded library: it speaks when loaded and unloaded, asks for symbols, and wraps a call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void say(const char *text)
{
	ssize_t done = write(2, text, strlen(text));
	(void)done;
}

int puts(const char *text)
{
	static int (*real)(const char *);
	if (!real)
		real = (int (*)(const char *))dlsym(RTLD_NEXT, "puts");
	return real(text);
}

__attribute__((constructor)) static void begin(void)
{
	say(dlsym(RTLD_NEXT, "puts") ? "second: ready\n" : "second: lost\n");
}

__attribute__((destructor)) static void end(void)
{
	say("second: done\n");
}
