/* SPDX-License-Identifier: Apache-2.0 */
/* KVSPLICE_SECRET_FILE: both sides prove that they know it, neither says it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "link.h"
#include "sha256.h"

void kvs_secret_proof(const char *side, const uint8_t first[KVS_NONCE_SIZE], const uint8_t second[KVS_NONCE_SIZE],
                      const uint8_t key[KVS_KEY_SIZE], uint8_t proof_p[KVS_PROOF_SIZE])
{
	const struct kvs_config *config = kvs_config_get();
	uint8_t data[16 + 2 * KVS_NONCE_SIZE + KVS_KEY_SIZE] = {0};
	memset(proof_p, 0, KVS_PROOF_SIZE);
	if (!config->has_secret)
		return;
	/* The side's name keeps one side's proof from being sent back as the other's. */
	memcpy(data, side, strnlen(side, 16));
	memcpy(data + 16, first, KVS_NONCE_SIZE);
	memcpy(data + 16 + KVS_NONCE_SIZE, second, KVS_NONCE_SIZE);
	memcpy(data + 16 + (size_t)2 * KVS_NONCE_SIZE, key, KVS_KEY_SIZE);
	kvs_hmac_sha256(config->secret, config->secret_size, data, sizeof(data), proof_p);
}

bool kvs_secret_read(const char *path, uint8_t secret_p[KVS_SECRET_MAX], size_t *size_p, struct kvs_text *text)
{
	struct stat st;
	size_t size = 0;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) != 0) {
		kvs_text_set(text, "secret file %.200s: %m", path);
		if (fd >= 0)
			close(fd);
		return false;
	}
	if (!S_ISREG(st.st_mode) || (st.st_mode & (S_IRWXG | S_IRWXO)) != 0 || st.st_size > KVS_SECRET_MAX) {
		kvs_text_set(
		        text,
		        "secret file %.200s: must be a regular file of at most %d bytes that only its owner can read "
		        "(chmod 600)",
		        path, KVS_SECRET_MAX);
		close(fd);
		return false;
	}
	while (size < KVS_SECRET_MAX) {
		ssize_t got = read(fd, secret_p + size, KVS_SECRET_MAX - size);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			break;
		size += (size_t)got;
	}
	close(fd);
	while (size > 0 && (secret_p[size - 1] == '\n' || secret_p[size - 1] == '\r'))
		size--; /* as editors leave it */
	if (size < 16) {
		kvs_text_set(text, "secret file %.200s: holds %zu bytes, at least 16 are needed", path, size);
		return false;
	}
	*size_p = size;
	return true;
}
