/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver that offers one function: the one that finds all others, none of which it has. */
int cuGetProcAddress(const char *symbol, void **function, int version, unsigned long long flags)
{
	(void)symbol;
	(void)version;
	(void)flags;
	*function = 0;
	return 500; /* CUDA_ERROR_NOT_FOUND */
}
