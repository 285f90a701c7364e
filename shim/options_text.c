/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of the option table, and the table as text. Needs nothing else of the library: a small program prints it. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "options_row.h"

#define AT(field) offsetof(struct kvs_options, field), sizeof(((struct kvs_options *)0)->field)
#define FLAG_ROW(field, tail, value, shown, help) \
	{KVS_OPTION_FLAG, KVS_OPTION_PREFIX tail, AT(field), NULL, "0, 1", 0, 1, value, NULL, shown, help},
#define WORD_ROW(field, tail, words, value, shown, help) \
	{KVS_OPTION_WORD, KVS_OPTION_PREFIX tail, AT(field), words, NULL, 0, 0, value, NULL, shown, help},
#define NUMBER_ROW(field, tail, least, most, value, shown, help) \
	{KVS_OPTION_NUMBER, KVS_OPTION_PREFIX tail, AT(field), NULL, NULL, least, most, value, NULL, shown, help},
#define TEXT_ROW(field, tail, size, words, range, value, shown, help) \
	{KVS_OPTION_TEXT, KVS_OPTION_PREFIX tail, AT(field), words, range, 0, 0, 0, value, shown, help},

const struct kvs_option_row kvs_option_rows[] = {KVS_OPTION_TABLE(FLAG_ROW, WORD_ROW, NUMBER_ROW, TEXT_ROW)};
const size_t kvs_option_row_count = sizeof kvs_option_rows / sizeof *kvs_option_rows;

struct output {
	char *buffer;
	size_t size;
	size_t used;
};

__attribute__((format(printf, 2, 3))) static void put(struct output *out, const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	size_t left = out->used < out->size ? out->size - out->used : 0;
	int length = vsnprintf(left ? out->buffer + out->used : NULL, left, format, arguments);
	va_end(arguments);
	if (length > 0)
		out->used += (size_t)length;
}

static void put_range(struct output *out, const struct kvs_option_row *row)
{
	if (row->range)
		put(out, "%s", row->range);
	else if (row->words)
		put(out, "%s", row->words);
	else
		put(out, "%lld to %lld", (long long)row->least, (long long)row->most);
	if (row->range && row->words)
		put(out, " (%s)", row->words);
}

size_t kvs_options_table(char *buffer_p, size_t size)
{
	struct output out = {buffer_p, size, 0};
	if (size)
		*buffer_p = '\0';
	put(&out, "kvsplice %s options (environment variables)\n", KVS_VERSION);
	for (size_t i = 0; i < kvs_option_row_count; i++) {
		const struct kvs_option_row *row = &kvs_option_rows[i];
		put(&out, "  %s\n      default: %s\n      values:  ", row->name, row->shown);
		put_range(&out, row);
		put(&out, "\n      %s\n", row->help);
	}
	return out.used;
}
