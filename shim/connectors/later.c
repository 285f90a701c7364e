/* SPDX-License-Identifier: Apache-2.0 */
#include "later.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "../../transport/log.h"
#include "sglang.h"

/* One pull; shared by its thread and its status object, freed by the last of them. */
struct later {
	pthread_mutex_t lock; /* of what follows up to holders */
	pthread_cond_t ended;
	bool done;
	bool failed;
	struct kvs_text text;
	int holders;
	struct kvs_pull pull;
	char component[KVS_NAME_SIZE];
	int32_t items[]; /* source items, then destination items */
};

static void drop(struct later *later)
{
	pthread_mutex_lock(&later->lock);
	bool last = --later->holders == 0;
	pthread_mutex_unlock(&later->lock);
	if (!last)
		return;
	pthread_cond_destroy(&later->ended);
	pthread_mutex_destroy(&later->lock);
	free(later);
}

/* Judge and pull; true: the bytes are in place, or are another rank's to send. */
static bool pull_now(struct later *later, struct kvs_text *text)
{
	const struct kvs_pull *pull = &later->pull;
	struct kvs_verdict verdict;
	kvs_peer_verdict(pull->endpoint, pull->peer, pull->component, &verdict);
	switch (verdict.action) {
	case KVS_ACT_SKIP:
		return true;
	case KVS_ACT_COPY:
	case KVS_ACT_SLICE:
		return kvs_pull(pull, text);
	case KVS_ACT_PASS:
		/* The caller has returned, so it is too late for the connector's own path. */
		kvs_text_set(&verdict.text, "the decode rank takes it to be at equal TP, this one does not");
		break;
	case KVS_ACT_REFUSE:
		break;
	}
	*text = verdict.text;
	kvs_log(KVS_LOG_WARN, "room %llu, component %s: %s", (unsigned long long)pull->room, later->component, text->s);
	kvs_source_fail(pull->endpoint, pull->peer, pull->room, pull->generation, text->s);
	return false;
}

static void *run(void *argument)
{
	struct later *later = argument;
	struct kvs_text text = {""};
	bool moved = pull_now(later, &text);
	pthread_mutex_lock(&later->lock);
	later->done = true;
	later->failed = !moved;
	later->text = text;
	pthread_cond_broadcast(&later->ended);
	pthread_mutex_unlock(&later->lock);
	drop(later);
	return NULL;
}

/* ---- the status object ---- */

static void status_destroy(KvsPyObject *capsule)
{
	struct later *later = kvs_py.PyCapsule_GetPointer(capsule, KVS_CAPSULE);
	if (later)
		drop(later);
}

enum question { IN_PROGRESS, SUCCEEDED, FAILED };

static KvsPyObject *answer(KvsPyObject *self, enum question question)
{
	struct later *later = kvs_py.PyCapsule_GetPointer(self, KVS_CAPSULE);
	if (!later)
		return NULL;
	pthread_mutex_lock(&later->lock);
	bool yes = question == IN_PROGRESS ? !later->done : later->done && later->failed == (question == FAILED);
	pthread_mutex_unlock(&later->lock);
	return kvs_py.PyLong_FromLongLong(yes);
}

static KvsPyObject *in_progress(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	(void)args;
	(void)kwargs;
	return answer(self, IN_PROGRESS);
}

static KvsPyObject *succeeded(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	(void)args;
	(void)kwargs;
	return answer(self, SUCCEEDED);
}

static KvsPyObject *failed(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	(void)args;
	(void)kwargs;
	return answer(self, FAILED);
}

static KvsPyObject *message(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	(void)args;
	(void)kwargs;
	struct later *later = kvs_py.PyCapsule_GetPointer(self, KVS_CAPSULE);
	if (!later)
		return NULL;
	pthread_mutex_lock(&later->lock);
	struct kvs_text text = later->text;
	pthread_mutex_unlock(&later->lock);
	return kvs_py.PyUnicode_FromString(text.s);
}

static KvsPyObject *wait_for_end(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs)
{
	(void)args;
	(void)kwargs;
	struct later *later = kvs_py.PyCapsule_GetPointer(self, KVS_CAPSULE);
	if (!later)
		return NULL;
	void *state = kvs_py.PyEval_SaveThread();
	pthread_mutex_lock(&later->lock);
	while (!later->done)
		pthread_cond_wait(&later->ended, &later->lock);
	pthread_mutex_unlock(&later->lock);
	kvs_py.PyEval_RestoreThread(state);
	kvs_py.Py_IncRef(kvs_py.none);
	return kvs_py.none;
}

#define METHOD(method_name, method_function) \
	{ \
		.name = (method_name), .function = (method_function), \
		.flags = KVS_PY_METH_VARARGS | KVS_PY_METH_KEYWORDS \
	}
static struct kvs_py_method_def methods[] = {
        METHOD("InProgress", in_progress), METHOD("Succeeded", succeeded), METHOD("Failed", failed),
        METHOD("Message", message),        METHOD("Wait", wait_for_end),
};

/* The object, whose methods own the caller's hold on later together; NULL: no memory, and the hold is dropped. */
static KvsPyObject *make_status(struct later *later)
{
	KvsPyObject *object = kvs_sglang_namespace();
	KvsPyObject *capsule = kvs_py.PyCapsule_New(later, KVS_CAPSULE, status_destroy);
	bool ok = object && capsule;
	if (!capsule)
		drop(later);
	for (size_t i = 0; ok && i < sizeof methods / sizeof methods[0]; i++) {
		KvsPyObject *function = kvs_py.PyCFunction_NewEx(&methods[i], capsule, NULL);
		ok = function && kvs_py.PyObject_SetAttrString(object, methods[i].name, function) == 0;
		kvs_py.Py_DecRef(function);
	}
	kvs_py.Py_DecRef(capsule);
	if (ok)
		return object;
	kvs_py.PyErr_Clear();
	kvs_py.Py_DecRef(object);
	return NULL;
}

static struct later *make_later(const struct kvs_pull *pull, const char *component)
{
	size_t count = (size_t)pull->src_count + pull->dst_count;
	struct later *later = calloc(1, sizeof *later + count * sizeof later->items[0]);
	if (!later)
		return NULL;
	pthread_mutex_init(&later->lock, NULL);
	pthread_cond_init(&later->ended, NULL);
	later->holders = 2; /* the thread and the status object */
	later->pull = *pull;
	if (pull->src_count)
		memcpy(later->items, pull->src_items, pull->src_count * sizeof later->items[0]);
	if (pull->dst_count)
		memcpy(later->items + pull->src_count, pull->dst_items, pull->dst_count * sizeof later->items[0]);
	later->pull.src_items = later->items;
	later->pull.dst_items = later->items + pull->src_count;
	strncpy(later->component, component, sizeof later->component - 1);
	return later;
}

/* A thread of ours takes none of the server's signals. */
static int start_thread(struct later *later)
{
	pthread_t thread;
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int error = pthread_create(&thread, NULL, run, later);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error == 0)
		pthread_detach(thread);
	return error;
}

KvsPyObject *kvs_later_start(const struct kvs_pull *pull, const char *component, struct kvs_text *text)
{
	struct later *later = make_later(pull, component);
	KvsPyObject *status = later ? make_status(later) : NULL;
	if (!status) {
		kvs_text_set(text, "out of memory for a transfer of %u items", pull->src_count);
		if (later)
			drop(later); /* NOLINT(clang-analyzer-unix.Malloc): two holders, and this is the second to go */
		return NULL;
	}
	int error = start_thread(later);
	if (error == 0)
		return status;
	kvs_text_set(text, "no thread for the transfer: %s", strerror(error));
	drop(later);
	kvs_py.Py_DecRef(status);
	return NULL;
}
