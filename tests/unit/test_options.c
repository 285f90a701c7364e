/* SPDX-License-Identifier: Apache-2.0 */
/* The option table: defaults, values, clamping, guesses, and its own text. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shim/options.h"
#include "shim/options_row.h"

static char said[8192];
static int said_count;

static void note(void *user, const char *message)
{
	cr_assert_eq(user, (void *)said);
	size_t used = strlen(said);
	snprintf(said + used, sizeof said - used, "%s\n", message);
	said_count++;
}

static struct kvs_options read_one(const char *variable)
{
	char *environment[] = {(char *)"PATH=/bin", (char *)variable, NULL};
	struct kvs_options options;
	said[0] = '\0';
	said_count = 0;
	kvs_options_read(environment, &options, note, said);
	return options;
}

static void quiet(const char *variable)
{
	cr_assert_eq(said_count, 0, "%s: %s", variable, said);
}

static void warned(const char *variable, const char *text)
{
	cr_assert_eq(said_count, 1, "%s: %d lines: %s", variable, said_count, said);
	cr_assert(strstr(said, text), "%s: '%s' is not in '%s'", variable, text, said);
}

Test(options, defaults)
{
	struct kvs_options o = read_one("HOME=/");
	quiet("no variable");
	cr_assert(o.enable && !o.help);
	cr_assert_eq(o.policy, KVS_POLICY_AUTO);
	cr_assert_str_eq(o.transport, "cuda_ipc,rdma,host,tcp,engine");
	cr_assert_str_empty(o.rdma_device);
	cr_assert_eq(o.rdma_gid_index, -1);
	cr_assert_str_empty(o.listen);
	cr_assert_str_empty(o.secret_file);
	cr_assert_eq(o.staging_mb, 64);
	cr_assert_eq(o.cpu_heads, KVS_CPU_HEADS_PADDED);
	cr_assert_eq(o.timeout_ms, 30000);
	cr_assert_str_empty(o.stats);
	cr_assert_eq(o.log, 1);
}

Test(options, no_environment_at_all)
{
	struct kvs_options o;
	kvs_options_read(NULL, &o, NULL, NULL);
	cr_assert_eq(o.staging_mb, 64);
}

Test(options, values)
{
	cr_assert_eq(read_one("KVSPLICE_POLICY=off").policy, KVS_POLICY_OFF);
	cr_assert_eq(read_one("KVSPLICE_POLICY=REFUSED").policy, KVS_POLICY_REFUSED);
	cr_assert_eq(read_one("KVSPLICE_CPU_HEADS=replicated").cpu_heads, KVS_CPU_HEADS_REPLICATED);
	cr_assert_eq(read_one("KVSPLICE_LOG=debug").log, 3);
	cr_assert_eq(read_one("KVSPLICE_STAGING_MB=1").staging_mb, 1);
	cr_assert_eq(read_one("KVSPLICE_TIMEOUT_MS=250").timeout_ms, 250);
	cr_assert_str_eq(read_one("KVSPLICE_LISTEN=[::1]:7000-7010").listen, "[::1]:7000-7010");
	cr_assert_str_eq(read_one("KVSPLICE_STATS=/tmp/a b=c").stats, "/tmp/a b=c");
	cr_assert(read_one("KVSPLICE_HELP=1").help);
	cr_assert_not(read_one("KVSPLICE_ENABLE=off").enable);
	quiet("good values");
}

Test(options, empty_means_unset)
{
	for (size_t i = 0; i < kvs_option_row_count; i++) {
		char variable[128];
		snprintf(variable, sizeof variable, "%s=", kvs_option_rows[i].name);
		struct kvs_options o = read_one(variable), defaults = read_one("HOME=/");
		quiet(variable);
		cr_assert_eq(memcmp(&o, &defaults, sizeof o), 0, "%s", variable);
	}
}

Test(options, numbers_are_clamped_with_a_word)
{
	static const struct {
		const char *variable;
		int64_t value;
		const char *text;
	} cases[] = {
	        {"KVSPLICE_STAGING_MB=0", 1, "KVSPLICE_STAGING_MB=0 is outside 1 to 4096; 1 is used"},
	        {"KVSPLICE_STAGING_MB=-5", 1, "is outside 1 to 4096; 1 is used"},
	        {"KVSPLICE_STAGING_MB=4097", 4096, "is outside 1 to 4096; 4096 is used"},
	        {"KVSPLICE_STAGING_MB=99999999999999999999999", 4096, "4096 is used"},
	        {"KVSPLICE_STAGING_MB=-99999999999999999999999", 1, "1 is used"},
	        {"KVSPLICE_STAGING_MB=64M", 64, "is not a whole number; 64 is used"},
	        {"KVSPLICE_STAGING_MB=x", 64, "is not a whole number; 64 is used"},
	        {"KVSPLICE_STAGING_MB= ", 64, "is not a whole number; 64 is used"},
	        {"KVSPLICE_STAGING_MB=1.5", 64, "is not a whole number; 64 is used"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		cr_assert_eq(read_one(cases[i].variable).staging_mb, cases[i].value, "%s", cases[i].variable);
		warned(cases[i].variable, cases[i].text);
	}
}

Test(options, unknown_words_keep_the_default_and_get_a_guess)
{
	cr_assert_eq(read_one("KVSPLICE_POLICY=autos").policy, KVS_POLICY_AUTO);
	warned("autos", "KVSPLICE_POLICY=autos is none of: auto refused all off (maybe auto?); auto is used");
	cr_assert_eq(read_one("KVSPLICE_POLICY=refsued").policy, KVS_POLICY_AUTO);
	warned("refsued", "(maybe refused?)");
	cr_assert_eq(read_one("KVSPLICE_LOG=chatty").log, 1);
	warned("chatty", "KVSPLICE_LOG=chatty is none of: error warn info debug; warn is used");
	cr_assert(read_one("KVSPLICE_ENABLE=perhaps").enable);
	warned("perhaps", "is neither 0 nor 1; 1 is used");
}

Test(options, transport_lists)
{
	cr_assert_str_eq(read_one("KVSPLICE_TRANSPORT=tcp,host").transport, "tcp,host");
	cr_assert_str_eq(read_one("KVSPLICE_TRANSPORT= HOST , ,tcp,host,").transport, "host,tcp");
	quiet("lists");
	cr_assert_str_eq(read_one("KVSPLICE_TRANSPORT=hots,tcp").transport, "tcp");
	warned("hots",
	       "KVSPLICE_TRANSPORT: hots is none of: cuda_ipc rdma host tcp engine (maybe host?); it is left out");
	cr_assert_str_eq(read_one("KVSPLICE_TRANSPORT=,").transport, "cuda_ipc,rdma,host,tcp,engine");
	warned("comma", "names nothing");
	char long_list[4096] = "KVSPLICE_TRANSPORT=tcp";
	while (strlen(long_list) < sizeof long_list - 8)
		strcat(long_list, ",host");
	cr_assert_str_eq(read_one(long_list).transport, "tcp,host");
	quiet("a long list");
}

Test(options, long_texts_are_not_cut)
{
	char variable[4096] = "KVSPLICE_SECRET_FILE=";
	size_t head = strlen(variable);
	memset(variable + head, 'a', 1023);
	cr_assert_eq(strlen(read_one(variable).secret_file), 1023);
	quiet("1023 bytes");
	memset(variable + head, 'a', 1024);
	cr_assert_str_empty(read_one(variable).secret_file);
	warned("1024 bytes", "KVSPLICE_SECRET_FILE is longer than 1023 bytes; unset is used");
}

Test(options, rdma)
{
	cr_assert_str_eq(read_one("KVSPLICE_RDMA_DEVICE=mlx5_0:1").rdma_device, "mlx5_0:1");
	quiet("a device");
	cr_assert_eq(read_one("KVSPLICE_RDMA_GID_INDEX=3").rdma_gid_index, 3);
	quiet("a GID");
	cr_assert_eq(read_one("KVSPLICE_LOG=info").rdma_gid_index, -1);
	cr_assert_eq(read_one("KVSPLICE_RDMA_TRAFFIC_CLASS=300").rdma_traffic_class, 255);
	warned("RDMA_TRAFFIC_CLASS", "300");
	cr_assert(read_one("KVSPLICE_VERIFY=1").verify);
	quiet("verify");
}

Test(options, unknown_names_get_a_guess)
{
	read_one("KVSPLICE_TRANSPROT=host");
	warned("TRANSPROT", "there is no variable KVSPLICE_TRANSPROT (maybe KVSPLICE_TRANSPORT?)");
	read_one("KVSPLICE_LOGS=info");
	warned("LOGS", "(maybe KVSPLICE_LOG?)");
	read_one("KVSPLICE_SOMETHING_ELSE=1");
	warned("SOMETHING_ELSE", "there is no variable KVSPLICE_SOMETHING_ELSE; KVSPLICE_HELP=1 lists them");
	read_one("KVSPLICE_=1");
	cr_assert_eq(said_count, 1);
	read_one("KVSPLICE=1");
	quiet("another program's name");
	read_one("NO_EQUALS_SIGN");
	quiet("no value");
	char name[4096] = "KVSPLICE_";
	memset(name + 9, 'X', 3000);
	strcpy(name + 3009, "=1");
	read_one(name);
	cr_assert_eq(said_count, 1);
}

Test(options, distance)
{
	cr_assert_eq(kvs_option_distance("", ""), 0);
	cr_assert_eq(kvs_option_distance("abc", ""), 3);
	cr_assert_eq(kvs_option_distance("kitten", "sitting"), 3);
	cr_assert_eq(kvs_option_distance("TRANSPROT", "TRANSPORT"), 1);
	cr_assert_eq(kvs_option_distance("abcd", "badc"), 2);
	char text[80];
	memset(text, 'a', sizeof text);
	text[64] = '\0';
	cr_assert_eq(kvs_option_distance(text, "a"), INT_MAX);
	text[63] = '\0';
	cr_assert_eq(kvs_option_distance(text, "a"), 62);
}

Test(options, the_table_prints_every_variable)
{
	char table[16384];
	size_t size = kvs_options_table(table, sizeof table);
	cr_assert_eq(size, strlen(table));
	for (size_t i = 0; i < kvs_option_row_count; i++) {
		cr_assert(strstr(table, kvs_option_rows[i].name), "%s", kvs_option_rows[i].name);
		cr_assert(strstr(table, kvs_option_rows[i].help), "%s", kvs_option_rows[i].help);
	}
	/* The sizes and the truncation of snprintf. */
	char small[10];
	cr_assert_eq(kvs_options_table(small, sizeof small), size);
	cr_assert_eq(strlen(small), sizeof small - 1);
	cr_assert_eq(kvs_options_table(NULL, 0), size);
}

Test(options, table_rows_are_sound)
{
	for (size_t i = 0; i < kvs_option_row_count; i++) {
		const struct kvs_option_row *row = &kvs_option_rows[i];
		cr_assert_leq(row->offset + row->size, sizeof(struct kvs_options));
		cr_assert_eq(strncmp(row->name, KVS_OPTION_PREFIX, strlen(KVS_OPTION_PREFIX)), 0);
		if (row->kind == KVS_OPTION_WORD) {
			int size = 0;
			const char *word = kvs_option_word_name(row->words, row->number, &size);
			cr_assert_not_null(word);
			cr_assert_eq(strncmp(word, row->shown, (size_t)size), 0, "%s: the default's text", row->name);
			cr_assert_eq(strlen(row->shown), (size_t)size);
		}
		if (row->kind == KVS_OPTION_TEXT)
			cr_assert_lt(strlen(row->text), row->size, "%s: the default fits", row->name);
	}
	int size = 0;
	cr_assert_null(kvs_option_word_name("a b", 2, &size));
	cr_assert_null(kvs_option_word_name("a b", -1, &size));
}

Test(options, kill_switch)
{
	static const char *const off[] = {"0", "no", "off", "false", "OFF"};
	static const char *const on[] = {"1", "yes", "on", "", "2", "nonsense"};
	unsetenv("KVSPLICE_ENABLE");
	cr_assert_not(kvs_options_disabled());
	for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
		setenv("KVSPLICE_ENABLE", off[i], 1);
		cr_assert(kvs_options_disabled(), "%s", off[i]);
	}
	for (size_t i = 0; i < sizeof on / sizeof *on; i++) {
		setenv("KVSPLICE_ENABLE", on[i], 1);
		cr_assert_not(kvs_options_disabled(), "%s", on[i]);
	}
}

Test(options, read_once)
{
	setenv("KVSPLICE_STAGING_MB", "7", 1);
	cr_assert_eq(kvs_options()->staging_mb, 7);
	setenv("KVSPLICE_STAGING_MB", "8", 1);
	cr_assert_eq(kvs_options()->staging_mb, 7);
}
