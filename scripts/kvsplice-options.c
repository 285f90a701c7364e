/* SPDX-License-Identifier: Apache-2.0 */
/* Print the option table of the library that it was built with: what "kvsplice options" and "--version" show. */
#include <stdio.h>
#include <string.h>

#include "../shim/options_row.h"

static void print_table(void)
{
	char table[16384];
	kvs_options_table(table, sizeof table);
	fputs(table, stdout);
}

static void print_markdown(void)
{
	puts("| variable | default | meaning |\n| --- | --- | --- |");
	for (size_t i = 0; i < kvs_option_row_count; i++) {
		const struct kvs_option_row *row = &kvs_option_rows[i];
		printf("| `%s` | `%s` | %s", row->name, row->shown, row->help);
		if (row->kind == KVS_OPTION_NUMBER)
			printf(" (%lld to %lld)", (long long)row->least, (long long)row->most);
		else if (row->range && row->kind == KVS_OPTION_TEXT)
			printf(" (%s)", row->range);
		puts(" |");
	}
}

int main(int argc, char **argv)
{
	if (argc == 1)
		print_table();
	else if (argc == 2 && strcmp(argv[1], "--markdown") == 0)
		print_markdown();
	else if (argc == 2 && strcmp(argv[1], "--version") == 0)
		puts("kvsplice " KVS_VERSION);
	else {
		fputs("usage: kvsplice-options [--markdown | --version]\n", stderr);
		return 2;
	}
	return fflush(stdout) == 0 ? 0 : 1;
}
