/* SPDX-License-Identifier: Apache-2.0 */
/* The option table as rows that code can walk. */
#ifndef KVS_OPTIONS_ROW_H
#define KVS_OPTIONS_ROW_H

#include "options.h"

#define KVS_OPTION_PREFIX "KVSPLICE_"

enum kvs_option_kind {
	KVS_OPTION_FLAG,
	KVS_OPTION_WORD,
	KVS_OPTION_NUMBER,
	KVS_OPTION_TEXT,
};

struct kvs_option_row {
	enum kvs_option_kind kind;
	const char *name;  /* with the prefix */
	size_t offset;     /* of the field in struct kvs_options */
	size_t size;       /* of the field */
	const char *words; /* space-separated; NULL: none */
	const char *range; /* TEXT: what it looks like; NULL: made from the other members */
	int64_t least, most;
	int64_t number;    /* default of all but TEXT */
	const char *text;  /* default of TEXT */
	const char *shown; /* the default, for people */
	const char *help;
};

extern const struct kvs_option_row kvs_option_rows[];
extern const size_t kvs_option_row_count;

/* Is the word of this size among space-separated words? Its number, or -1. */
int kvs_option_word(const char *words, const char *word, size_t size);

/* The number of edits (insert, delete, replace, swap of neighbours) between two short texts; INT_MAX for long ones. */
int kvs_option_distance(const char *a, const char *b);

#endif
