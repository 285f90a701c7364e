/* SPDX-License-Identifier: Apache-2.0 */
/* Print what a library that was loaded before main may have left behind. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static int entries(const char *folder)
{
	int count = 0;
	DIR *dir = opendir(folder);
	while (dir && readdir(dir))
		count++;
	if (dir)
		closedir(dir);
	return count - 2;
}

int main(void)
{
	int first_errno = errno;
	int handlers = 0;
	for (int number = 1; number < 65; number++) {
		struct sigaction action;
		if (sigaction(number, NULL, &action) == 0 && action.sa_handler != SIG_DFL)
			handlers++;
	}
	sigset_t mask;
	sigprocmask(SIG_BLOCK, NULL, &mask);
	int blocked = 0;
	for (int number = 1; number < 65; number++)
		blocked += sigismember(&mask, number) == 1;
#ifndef STATIC
	const char *message = dlerror();
	printf("dlerror %s\n", message ? message : "none");
#endif
	printf("errno %d\nthreads %d\ndescriptors %d\nhandlers %d\nblocked %d\n", first_errno,
	       entries("/proc/self/task"), entries("/proc/self/fd"), handlers, blocked);
	return 9;
}
