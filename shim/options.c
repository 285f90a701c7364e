/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "../transport/log.h"
#include "log.h"
#include "options_row.h"

#define GUESS_DISTANCE 3 /* a name further off than this is no guess */

struct reader {
	kvs_options_complain_t complain;
	void *user;
};

__attribute__((format(printf, 2, 3))) static void complain(const struct reader *reader, const char *format, ...)
{
	if (!reader->complain)
		return;
	char message[512];
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(message, sizeof message, format, arguments);
	va_end(arguments);
	reader->complain(reader->user, message);
}

/* ---- words and guesses ---- */

int kvs_option_word(const char *words, const char *word, size_t size)
{
	int number = 0;
	for (const char *at = words; *at; number++) {
		size_t length = strcspn(at, " ");
		if (length == size && strncasecmp(at, word, size) == 0)
			return number;
		at += length;
		at += strspn(at, " ");
	}
	return -1;
}

const char *kvs_option_word_name(const char *words, int64_t number, int *size_p)
{
	for (const char *at = words; *at; at += strspn(at, " "), number--) {
		size_t size = strcspn(at, " ");
		*size_p = (int)size;
		if (number == 0)
			return at;
		at += size;
	}
	return NULL;
}

int kvs_option_distance(const char *a, const char *b)
{
	enum { LONGEST = 63 };
	size_t na = strlen(a), nb = strlen(b);
	if (na > LONGEST || nb > LONGEST)
		return INT_MAX;
	int rows[3][LONGEST + 1];
	int *before = rows[0], *above = rows[1], *row = rows[2];
	for (size_t j = 0; j <= nb; j++)
		above[j] = before[j] = (int)j;
	for (size_t i = 1; i <= na; i++) {
		row[0] = (int)i;
		for (size_t j = 1; j <= nb; j++) {
			int cost = a[i - 1] != b[j - 1];
			int best = above[j - 1] + cost;
			if (above[j] + 1 < best)
				best = above[j] + 1;
			if (row[j - 1] + 1 < best)
				best = row[j - 1] + 1;
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best)
				best = before[j - 2] + 1;
			row[j] = best;
		}
		int *oldest = before;
		before = above;
		above = row;
		row = oldest;
	}
	return above[nb];
}

/* The nearest of space-separated words; size_p 0: none is near. */
static const char *nearest_word(const char *words, const char *word, size_t size, int *size_p)
{
	char wanted[64], candidate[64];
	const char *best = NULL;
	int least = GUESS_DISTANCE;
	snprintf(wanted, sizeof wanted, "%.*s", (int)(size < 63 ? size : 63), word);
	*size_p = 0;
	for (const char *at = words; *at; at += strspn(at, " ")) {
		size_t length = strcspn(at, " ");
		snprintf(candidate, sizeof candidate, "%.*s", (int)length, at);
		int distance = kvs_option_distance(wanted, candidate);
		/* Short words are near to everything; a guess must share at least half of its letters. */
		if (distance < least && distance * 2 <= (int)length) {
			least = distance;
			best = at;
			*size_p = (int)length;
		}
		at += length;
	}
	return best;
}

/* ---- values ---- */

static bool read_truth(const char *value, bool *truth_p)
{
	if (kvs_option_word("1 yes on true", value, strlen(value)) >= 0)
		*truth_p = true;
	else if (kvs_option_word("0 no off false", value, strlen(value)) >= 0)
		*truth_p = false;
	else
		return false;
	return true;
}

static void read_flag(const struct reader *reader, const struct kvs_option_row *row, const char *value, bool *field)
{
	if (!read_truth(value, field))
		complain(reader, "%s=%s is neither 0 nor 1; %d is used", row->name, value, *field);
}

static void read_word(const struct reader *reader, const struct kvs_option_row *row, const char *value, int64_t *field)
{
	int number = kvs_option_word(row->words, value, strlen(value));
	if (number >= 0) {
		*field = number;
		return;
	}
	int length = 0;
	const char *guess = nearest_word(row->words, value, strlen(value), &length);
	if (guess)
		complain(reader, "%s=%s is none of: %s (maybe %.*s?); %s is used", row->name, value, row->words, length,
		         guess, row->shown);
	else
		complain(reader, "%s=%s is none of: %s; %s is used", row->name, value, row->words, row->shown);
}

static void read_number(const struct reader *reader, const struct kvs_option_row *row, const char *value,
                        int64_t *field)
{
	char *end = NULL;
	errno = 0;
	long long number = strtoll(value, &end, 10); /* out of range: the nearest there is, which is clamped below */
	if (end == value || *end) {
		complain(reader, "%s=%s is not a whole number; %s is used", row->name, value, row->shown);
		return;
	}
	*field = number < row->least ? row->least : number > row->most ? row->most : number;
	if (errno || number != *field)
		complain(reader, "%s=%s is outside %lld to %lld; %lld is used", row->name, value, (long long)row->least,
		         (long long)row->most, (long long)*field);
}

static void bad_list_word(const struct reader *reader, const struct kvs_option_row *row, const char *word, size_t size)
{
	int length = 0;
	const char *guess = nearest_word(row->words, word, size, &length);
	if (guess)
		complain(reader, "%s: %.*s is none of: %s (maybe %.*s?); it is left out", row->name, (int)size, word,
		         row->words, length, guess);
	else
		complain(reader, "%s: %.*s is none of: %s; it is left out", row->name, (int)size, word, row->words);
}

/* Copy the list's known words, in order and once each, without spaces. */
static void read_list(const struct reader *reader, const struct kvs_option_row *row, const char *value, char *field)
{
	char list[1024] = "";
	size_t used = 0;
	uint64_t seen = 0;
	for (const char *at = value; *at; at += strspn(at, ", \t")) {
		size_t size = strcspn(at, ", \t");
		int number = size ? kvs_option_word(row->words, at, size) : -1;
		if (size && number < 0) {
			bad_list_word(reader, row, at, size);
		} else if (size && !(seen & 1ULL << number) && used + size + 2 <= row->size) {
			seen |= 1ULL << number;
			if (used)
				list[used++] = ',';
			for (size_t i = 0; i < size; i++)
				list[used++] = (char)tolower((unsigned char)at[i]);
			list[used] = '\0';
		}
		at += size;
	}
	if (used)
		memcpy(field, list, used + 1);
	else
		complain(reader, "%s=%s names nothing; %s is used", row->name, value, row->shown);
}

static void read_text(const struct reader *reader, const struct kvs_option_row *row, const char *value, char *field)
{
	if (row->words)
		read_list(reader, row, value, field);
	else if (strlen(value) >= row->size)
		complain(reader, "%s is longer than %zu bytes; %s is used", row->name, row->size - 1, row->shown);
	else
		memcpy(field, value, strlen(value) + 1);
}

static void read_value(const struct reader *reader, const struct kvs_option_row *row, const char *value,
                       struct kvs_options *options)
{
	char *field = (char *)options + row->offset;
	switch (row->kind) {
	case KVS_OPTION_FLAG:
		read_flag(reader, row, value, (bool *)field);
		break;
	case KVS_OPTION_WORD:
		read_word(reader, row, value, (int64_t *)(void *)field);
		break;
	case KVS_OPTION_NUMBER:
		read_number(reader, row, value, (int64_t *)(void *)field);
		break;
	case KVS_OPTION_TEXT:
		read_text(reader, row, value, field);
		break;
	}
}

/* ---- the environment ---- */

static void set_defaults(struct kvs_options *options_p)
{
	memset(options_p, 0, sizeof *options_p);
	for (size_t i = 0; i < kvs_option_row_count; i++) {
		const struct kvs_option_row *row = &kvs_option_rows[i];
		char *field = (char *)options_p + row->offset;
		if (row->kind == KVS_OPTION_FLAG)
			*(bool *)field = row->number != 0;
		else if (row->kind == KVS_OPTION_TEXT)
			snprintf(field, row->size, "%s", row->text);
		else
			*(int64_t *)(void *)field = row->number;
	}
}

static void unknown_name(const struct reader *reader, const char *name)
{
	const char *guess = NULL;
	int least = GUESS_DISTANCE + 1;
	for (size_t i = 0; i < kvs_option_row_count; i++) {
		int distance = kvs_option_distance(name, kvs_option_rows[i].name);
		if (distance < least) {
			least = distance;
			guess = kvs_option_rows[i].name;
		}
	}
	if (guess)
		complain(reader, "there is no variable %s (maybe %s?)", name, guess);
	else
		complain(reader, "there is no variable %s; KVSPLICE_HELP=1 lists them", name);
}

static void read_variable(const struct reader *reader, const char *variable, struct kvs_options *options_p)
{
	const char *equals = strchr(variable, '=');
	if (!equals || strncmp(variable, KVS_OPTION_PREFIX, strlen(KVS_OPTION_PREFIX)) != 0)
		return;
	char name[128];
	snprintf(name, sizeof name, "%.*s", (int)(equals - variable < 127 ? equals - variable : 127), variable);
	for (size_t i = 0; i < kvs_option_row_count; i++) {
		if (strcmp(name, kvs_option_rows[i].name) == 0) {
			/* Set but empty is how a shell says "not set". */
			if (equals[1])
				read_value(reader, &kvs_option_rows[i], equals + 1, options_p);
			return;
		}
	}
	unknown_name(reader, name);
}

void kvs_options_read(char *const *environment, struct kvs_options *options_p, kvs_options_complain_t complain_p,
                      void *user)
{
	struct reader reader = {complain_p, user};
	set_defaults(options_p);
	for (; environment && *environment; environment++)
		read_variable(&reader, *environment, options_p);
}

/* ---- this process ---- */

static struct kvs_options options;
static pid_t options_reader; /* the process that read them */
static pthread_once_t options_once = PTHREAD_ONCE_INIT;

static void read_environment(void)
{
	options_reader = getpid();
	kvs_options_read(environ, &options, NULL, NULL);
}

const struct kvs_options *kvs_options(void)
{
	pthread_once(&options_once, read_environment);
	return &options;
}

bool kvs_options_disabled(void)
{
	const char *value = getenv(KVS_OPTION_PREFIX "ENABLE");
	bool enable = true;
	return value && read_truth(value, &enable) && !enable;
}

static void warn_about(void *user, const char *message)
{
	(void)user;
	kvs_log_write(KVS_LOG_WARN, "options", "%s", message);
}

/* Read again rather than remember: the complaints are wanted in servers only. */
static void warn_about_all(void)
{
	struct kvs_options scratch;
	if (kvs_log_enabled(KVS_LOG_WARN))
		kvs_options_read(environ, &scratch, warn_about, NULL);
}

static bool same_values(const struct kvs_options *a, const struct kvs_options *b)
{
	for (size_t i = 0; i < kvs_option_row_count; i++) {
		const struct kvs_option_row *row = &kvs_option_rows[i];
		if (memcmp((const char *)a + row->offset, (const char *)b + row->offset, row->size) != 0)
			return false;
	}
	return true;
}

void kvs_options_renew(void)
{
	struct kvs_options now;
	if (kvs_options() && options_reader == getpid())
		return;
	options_reader = getpid();
	kvs_options_read(environ, &now, NULL, NULL);
	if (same_values(&now, &options))
		return;
	options = now;
	kvs_log_install();
	warn_about_all();
}

void kvs_options_report(void)
{
	static atomic_flag reported = ATOMIC_FLAG_INIT;
	if (atomic_flag_test_and_set(&reported))
		return;
	warn_about_all();
	if (kvs_options()->help) {
		char table[8192];
		size_t size = kvs_options_table(table, sizeof table);
		kvs_log_raw(table, size < sizeof table ? size : sizeof table - 1);
	}
}
