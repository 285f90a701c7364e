/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <stdarg.h>
#include <stdio.h>

void kvs_text_set(struct kvs_text *text, const char *format, ...)
{
	va_list args;

	if (!text)
		return;
	va_start(args, format);
	if (vsnprintf(text->s, sizeof(text->s), format, args) < 0)
		text->s[0] = '\0';
	va_end(args);
}
