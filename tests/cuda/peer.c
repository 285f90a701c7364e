/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "peer.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../transport/log.h"

static void map_ids(const char *file, unsigned id)
{
	char line[32];
	(void)snprintf(line, sizeof(line), "%u %u 1", id, id);
	int fd = open(file, O_WRONLY | O_CLOEXEC);
	if (fd >= 0 && write(fd, line, strlen(line)) < 0)
		fprintf(stderr, "%s: %m\n", file);
	if (fd >= 0)
		close(fd);
}

void enter_namespace(void)
{
	unsigned user = getuid();
	int status = 0;
	if (unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0)
		SKIP("no pid namespace of our own: unshare: %m");
	map_ids("/proc/self/uid_map", user);
	pid_t pid = fork();
	CHECK(pid >= 0, "fork: %m");
	if (pid == 0) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		return;
	}
	(void)waitpid(pid, &status, 0);
	_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}

struct peer peer_start(const char *extra, bool apart)
{
	int fds[2];
	char number[16];
	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds) == 0);
	struct peer peer = {.fd = fds[0], .pid = fork()};
	if (peer.pid == 0) {
		close(fds[0]);
		if (apart)
			enter_namespace();
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (extra != NULL)
			(void)putenv(strdup(extra));
		(void)snprintf(number, sizeof(number), "%d", fds[1]);
		(void)execl("/proc/self/exe", "prefill", "--prefill", number, (char *)NULL);
		exit(1);
	}
	CHECK(peer.pid > 0);
	close(fds[1]);
	return peer;
}

void peer_send(struct peer *peer, const struct message *message)
{
	CHECK(send(peer->fd, message, sizeof(*message), MSG_NOSIGNAL) == (ssize_t)sizeof(*message));
}

struct answer peer_wait(struct peer *peer)
{
	struct answer answer;
	CHECK(recv(peer->fd, &answer, sizeof(answer), 0) == (ssize_t)sizeof(answer), "the prefill is gone");
	return answer;
}

struct answer peer_do(struct peer *peer, const struct message *message)
{
	peer_send(peer, message);
	return peer_wait(peer);
}

void peer_kill(struct peer *peer)
{
	int status;
	(void)kill(peer->pid, SIGKILL);
	(void)waitpid(peer->pid, &status, 0);
	close(peer->fd);
}

void peer_stop(struct peer *peer)
{
	int status = 0;
	close(peer->fd);
	if (peer->pid == 0)
		return;
	CHECK(waitpid(peer->pid, &status, 0) == peer->pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the prefill ended with %x", (unsigned)status);
}

/* ---- the prefill's own process ---- */

#define RANKS 16

static struct rank ranks[RANKS];
static uint64_t endpoints[RANKS];
static uint32_t rank_count;
static kvs_cu_stream capture_stream;

static void say(enum kvs_log_level level, const char *function, const char *text)
{
	if (getenv("KVS_TEST_VERBOSE") != NULL)
		fprintf(stderr, "[prefill] %d %s: %s\n", (int)level, function, text);
}

static bool setup(const struct driver *driver, const struct message *m, struct kvs_text *text)
{
	struct kvs_agent_config config = {.timeout_ms = m->timeout_ms != 0 ? m->timeout_ms : 10000,
	                                  .staging_bytes = 8u << 20,
	                                  .transports = m->transports,
	                                  .verify = m->verify,
	                                  .rdma_device = NULL};
	if (!kvs_agent_configure(&config, text))
		return false;
	driver = driver_start(m->device);
	rank_count = m->tp_size;
	for (uint32_t r = 0; r < rank_count; r++) {
		ranks[r] = rank_new(driver, &m->shape, m->tp_size, r, m->device, m->kind, m->parts, 0);
		rank_fill(driver, &ranks[r]);
		endpoints[r] = kvs_endpoint_add(KVS_ROLE_PREFILL, ranks[r].layout, "127.0.0.1", text);
		if (endpoints[r] == 0)
			return false;
	}
	return true;
}

static bool pull(const struct message *m, uint32_t rank, struct kvs_text *text)
{
	struct kvs_pull pull = {.endpoint = endpoints[rank],
	                        .peer = m->peer,
	                        .room = m->room,
	                        .generation = m->generation,
	                        .chunk = m->chunk,
	                        .component = m->component,
	                        .src_items = m->src,
	                        .src_count = m->count,
	                        .dst_items = m->dst,
	                        .dst_count = m->count};
	return kvs_pull(&pull, text);
}

struct puller {
	pthread_t thread;
	const struct message *message;
	uint32_t rank;
	bool ok;
	struct kvs_text text;
};

static void *puller_main(void *argument)
{
	struct puller *puller = argument;
	puller->ok = pull(puller->message, puller->rank, &puller->text);
	return NULL;
}

static bool pull_replaced(const struct driver *driver, const struct message *m, struct kvs_text *text)
{
	struct puller puller = {.message = m, .rank = m->rank};
	CHECK(pthread_create(&puller.thread, NULL, puller_main, &puller) == 0);
	usleep((useconds_t)m->number);
	block_pause(driver, &ranks[m->rank].block);
	block_resume(driver, &ranks[m->rank].block);
	rank_fill(driver, &ranks[m->rank]);
	CHECK(pthread_join(puller.thread, NULL) == 0);
	*text = puller.text;
	return puller.ok;
}

static bool pull_all(const struct message *m, struct kvs_text *text)
{
	struct puller pullers[RANKS];
	bool ok = true;
	for (uint32_t r = 0; r < rank_count; r++) {
		pullers[r] = (struct puller){.message = m, .rank = r};
		CHECK(pthread_create(&pullers[r].thread, NULL, puller_main, &pullers[r]) == 0);
	}
	for (uint32_t r = 0; r < rank_count; r++) {
		CHECK(pthread_join(pullers[r].thread, NULL) == 0);
		if (ok && !pullers[r].ok)
			*text = pullers[r].text;
		ok = ok && pullers[r].ok;
	}
	return ok;
}

static bool obey(const struct driver *driver, const struct message *m, uint64_t *number_p, struct kvs_text *text)
{
	void *graph = NULL;
	switch (m->order) {
	case ORDER_SETUP:
		return setup(driver, m, text);
	case ORDER_PEER:
		*number_p = kvs_peer_add(m->record, m->record_size, text);
		return *number_p != 0;
	case ORDER_PULL:
		return pull(m, m->rank, text);
	case ORDER_PULL_REPLACED:
		return pull_replaced(driver, m, text);
	case ORDER_PULL_ALL:
		return pull_all(m, text);
	case ORDER_PAUSE:
		block_pause(driver, &ranks[m->rank].block);
		return true;
	case ORDER_RESUME:
		block_resume(driver, &ranks[m->rank].block);
		rank_fill(driver, &ranks[m->rank]);
		return true;
	case ORDER_FREE:
		block_free(driver, &ranks[m->rank].block);
		return true;
	case ORDER_LIVE:
		*number_p = (uint64_t)driver->live(m->text);
		return true;
	case ORDER_CALLS:
		*number_p = driver->calls(m->text[0] == '\0' ? NULL : m->text);
		return true;
	case ORDER_FAULT:
		return driver->fault(m->text) == 0;
	case ORDER_WRITES:
		*number_p = driver->writes(ranks[m->rank].block.address);
		return true;
	case ORDER_CANCEL:
		kvs_source_cancel(endpoints[m->rank], m->room);
		return true;
	case ORDER_FORGET:
		kvs_source_forget(endpoints[m->rank], m->room);
		return true;
	case ORDER_CAPTURE:
		if (m->number == 1) {
			CHECK(driver->cuda->StreamCreateWithPriority(&capture_stream, 1, 0) == 0);
			*number_p = driver->StreamBeginCapture(capture_stream, KVS_CU_CAPTURE_MODE_GLOBAL);
		} else {
			*number_p = driver->StreamEndCapture(capture_stream, &graph);
		}
		return true;
	}
	return false;
}

int prefill_main(int fd)
{
	struct message message;
	struct answer answer;
	const struct driver *driver = driver_start(0);
	kvs_log_set_sink(say, KVS_LOG_DEBUG);
	while (recv(fd, &message, sizeof(message), 0) == (ssize_t)sizeof(message)) {
		struct kvs_text text = {.s = ""};
		memset(&answer, 0, sizeof(answer));
		answer.ok = obey(driver, &message, &answer.number, &text);
		(void)snprintf(answer.text, sizeof(answer.text), "%s", text.s);
		if (send(fd, &answer, sizeof(answer), MSG_NOSIGNAL) != (ssize_t)sizeof(answer))
			break;
	}
	for (uint32_t r = 0; r < rank_count; r++)
		kvs_endpoint_remove(endpoints[r]);
	return 0;
}
