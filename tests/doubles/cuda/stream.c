/* SPDX-License-Identifier: Apache-2.0 */
/* Streams that really run later, each on a thread of its own; events; graph capture as far as it can be disturbed. */
#include <stdlib.h>
#include <string.h>

#include "double.h"

struct work {
	struct work *next;
	unsigned (*run)(void *data, int device);
	void (*call)(void *argument); /* a host function: not called after an error of the context */
	void *argument;
	struct CUevent_st *event; /* recorded once it has run */
	uint64_t event_number;
	_Alignas(16) unsigned char data[];
};

struct CUstream_st {
	struct CUctx_st *context;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct work *first;
	struct work **end;
	bool running;
	bool stop;
	bool capturing;
};

struct CUevent_st {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct CUctx_st *context;
	uint64_t recorded;
	uint64_t reached;
};

static _Atomic int streams, events;

/* One capture at a time is enough to be disturbed. */
static pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *capture_stream;
static unsigned capture_mode;
static bool capture_broken;
static pthread_t capture_thread;
__thread bool in_host_function;
static __thread unsigned thread_mode = KVS_CU_CAPTURE_MODE_GLOBAL;

bool capture_forbids(enum safety safety)
{
	if (safety == SAFE)
		return false;
	pthread_mutex_lock(&capture_lock);
	bool concerned = capture_stream != NULL && thread_mode != KVS_CU_CAPTURE_MODE_RELAXED &&
	                 (capture_mode == KVS_CU_CAPTURE_MODE_GLOBAL ||
	                  (capture_mode == 1 && pthread_equal(capture_thread, pthread_self())));
	if (concerned)
		capture_broken = true;
	pthread_mutex_unlock(&capture_lock);
	return concerned;
}

int live_streams(void)
{
	return streams;
}

int live_events(void)
{
	return events;
}

static void *stream_main(void *argument)
{
	struct CUstream_st *stream = argument;
	pthread_mutex_lock(&stream->lock);
	for (;;) {
		while (stream->first == NULL && !stream->stop)
			pthread_cond_wait(&stream->changed, &stream->lock);
		struct work *work = stream->first;
		if (work == NULL)
			break;
		stream->first = work->next;
		if (stream->first == NULL)
			stream->end = &stream->first;
		stream->running = true;
		pthread_mutex_unlock(&stream->lock);
		if (work->run != NULL) {
			delay();
			/* After an error nothing of the context runs any more. */
			if (stream->context->error == OK)
				stream->context->error = work->run(work->data, stream->context->device);
		}
		if (work->call != NULL && stream->context->error == OK) {
			in_host_function = true;
			work->call(work->argument);
			in_host_function = false;
		}
		if (work->event != NULL) {
			pthread_mutex_lock(&work->event->lock);
			work->event->reached = work->event_number;
			pthread_cond_broadcast(&work->event->changed);
			pthread_mutex_unlock(&work->event->lock);
		}
		free(work);
		pthread_mutex_lock(&stream->lock);
		stream->running = false;
		pthread_cond_broadcast(&stream->changed);
	}
	pthread_mutex_unlock(&stream->lock);
	return NULL;
}

static unsigned put_work(struct CUstream_st *stream, struct work *work)
{
	pthread_mutex_lock(&stream->lock);
	*stream->end = work;
	stream->end = &work->next;
	pthread_cond_broadcast(&stream->changed);
	pthread_mutex_unlock(&stream->lock);
	return OK;
}

unsigned stream_put(struct CUstream_st *stream, unsigned (*run)(void *work, int device), const void *data, size_t size)
{
	if (stream == NULL)
		return INVALID_HANDLE;
	struct work *work = calloc(1, sizeof(*work) + size);
	if (work == NULL)
		return OUT_OF_MEMORY;
	work->run = run;
	memcpy(work->data, data, size);
	return put_work(stream, work);
}

unsigned cuStreamCreateWithPriority(struct CUstream_st **stream_p, unsigned flags, int priority);
static unsigned create(struct CUstream_st **stream_p, unsigned flags)
{
	struct CUctx_st *context = current();
	if (context == NULL)
		return INVALID_CONTEXT;
	struct CUstream_st *stream = calloc(1, sizeof(*stream));
	if (stream == NULL || flags > 1)
		return stream == NULL ? OUT_OF_MEMORY : INVALID_VALUE;
	stream->context = context;
	stream->end = &stream->first;
	pthread_mutex_init(&stream->lock, NULL);
	pthread_cond_init(&stream->changed, NULL);
	if (pthread_create(&stream->thread, NULL, stream_main, stream) != 0) {
		free(stream);
		return OUT_OF_MEMORY;
	}
	streams++;
	*stream_p = stream;
	return OK;
}

EXPORT unsigned cuStreamCreateWithPriority(struct CUstream_st **stream_p, unsigned flags, int priority)
{
	ENTER(StreamCreateWithPriority);
	(void)priority;
	return create(stream_p, flags);
}

unsigned cuStreamCreate(struct CUstream_st **stream_p, unsigned flags);
EXPORT unsigned cuStreamCreate(struct CUstream_st **stream_p, unsigned flags)
{
	ENTER(StreamCreate);
	return create(stream_p, flags);
}

static void drain(struct CUstream_st *stream)
{
	pthread_mutex_lock(&stream->lock);
	while (stream->first != NULL || stream->running)
		pthread_cond_wait(&stream->changed, &stream->lock);
	pthread_mutex_unlock(&stream->lock);
}

unsigned cuStreamSynchronize(struct CUstream_st *stream);
EXPORT unsigned cuStreamSynchronize(struct CUstream_st *stream)
{
	ENTER(StreamSynchronize);
	if (stream == NULL)
		return OK;
	drain(stream);
	return stream->context->error;
}

unsigned cuCtxSynchronize(void);
EXPORT unsigned cuCtxSynchronize(void)
{
	ENTER(CtxSynchronize);
	return current() == NULL ? INVALID_CONTEXT : current()->error;
}

unsigned cuStreamDestroy_v2(struct CUstream_st *stream);
EXPORT unsigned cuStreamDestroy_v2(struct CUstream_st *stream)
{
	ENTER(StreamDestroy);
	if (stream == NULL)
		return INVALID_HANDLE;
	pthread_mutex_lock(&stream->lock);
	stream->stop = true;
	pthread_cond_broadcast(&stream->changed);
	pthread_mutex_unlock(&stream->lock);
	pthread_join(stream->thread, NULL);
	pthread_mutex_destroy(&stream->lock);
	pthread_cond_destroy(&stream->changed);
	free(stream);
	streams--;
	return OK;
}

unsigned cuLaunchHostFunc(struct CUstream_st *stream, void (*function)(void *), void *data);
EXPORT unsigned cuLaunchHostFunc(struct CUstream_st *stream, void (*function)(void *), void *data)
{
	ENTER(LaunchHostFunc);
	struct work *work = stream == NULL || function == NULL ? NULL : calloc(1, sizeof(*work));
	if (work == NULL)
		return INVALID_VALUE;
	work->call = function;
	work->argument = data;
	return put_work(stream, work);
}

/* ---- capture ---- */

unsigned cuThreadExchangeStreamCaptureMode(unsigned *mode_p);
EXPORT unsigned cuThreadExchangeStreamCaptureMode(unsigned *mode_p)
{
	ENTER(ThreadExchangeStreamCaptureMode);
	unsigned before = thread_mode;
	if (*mode_p > KVS_CU_CAPTURE_MODE_RELAXED)
		return INVALID_VALUE;
	thread_mode = *mode_p;
	*mode_p = before;
	return OK;
}

unsigned cuStreamBeginCapture_v2(struct CUstream_st *stream, unsigned mode);
EXPORT unsigned cuStreamBeginCapture_v2(struct CUstream_st *stream, unsigned mode)
{
	ENTER(StreamBeginCapture);
	pthread_mutex_lock(&capture_lock);
	bool good = capture_stream == NULL && stream != NULL;
	if (good) {
		capture_stream = stream;
		capture_mode = mode;
		capture_broken = false;
		capture_thread = pthread_self();
	}
	pthread_mutex_unlock(&capture_lock);
	return good ? OK : INVALID_VALUE;
}

unsigned cuStreamEndCapture(struct CUstream_st *stream, void **graph_p);
EXPORT unsigned cuStreamEndCapture(struct CUstream_st *stream, void **graph_p)
{
	ENTER(StreamEndCapture);
	pthread_mutex_lock(&capture_lock);
	bool good = capture_stream == stream, broken = capture_broken;
	if (good)
		capture_stream = NULL;
	pthread_mutex_unlock(&capture_lock);
	*graph_p = good && !broken ? stream : NULL;
	return !good ? INVALID_VALUE : broken ? CAPTURE_INVALIDATED : OK;
}

unsigned cuGraphDestroy(void *graph);
EXPORT unsigned cuGraphDestroy(void *graph)
{
	ENTER(GraphDestroy);
	return graph == NULL ? INVALID_HANDLE : OK;
}

/* ---- events ---- */

unsigned cuEventCreate(struct CUevent_st **event_p, unsigned flags);
EXPORT unsigned cuEventCreate(struct CUevent_st **event_p, unsigned flags)
{
	ENTER(EventCreate);
	(void)flags;
	struct CUevent_st *event = current() == NULL ? NULL : calloc(1, sizeof(*event));
	if (event == NULL)
		return current() == NULL ? INVALID_CONTEXT : OUT_OF_MEMORY;
	event->context = current();
	pthread_mutex_init(&event->lock, NULL);
	pthread_cond_init(&event->changed, NULL);
	events++;
	*event_p = event;
	return OK;
}

unsigned cuEventRecord(struct CUevent_st *event, struct CUstream_st *stream);
EXPORT unsigned cuEventRecord(struct CUevent_st *event, struct CUstream_st *stream)
{
	ENTER(EventRecord);
	struct work *work = event == NULL || stream == NULL ? NULL : calloc(1, sizeof(*work));
	if (work == NULL)
		return INVALID_HANDLE;
	pthread_mutex_lock(&event->lock);
	work->event = event;
	work->event_number = ++event->recorded;
	pthread_mutex_unlock(&event->lock);
	return put_work(stream, work);
}

static unsigned event_state(struct CUevent_st *event, bool block)
{
	pthread_mutex_lock(&event->lock);
	while (block && event->reached < event->recorded)
		pthread_cond_wait(&event->changed, &event->lock);
	bool ready = event->reached >= event->recorded;
	pthread_mutex_unlock(&event->lock);
	return event->context->error != OK ? event->context->error : ready ? OK : KVS_CU_ERROR_NOT_READY;
}

unsigned cuEventQuery(struct CUevent_st *event);
EXPORT unsigned cuEventQuery(struct CUevent_st *event)
{
	ENTER(EventQuery);
	return event == NULL ? INVALID_HANDLE : event_state(event, false);
}

unsigned cuEventSynchronize(struct CUevent_st *event);
EXPORT unsigned cuEventSynchronize(struct CUevent_st *event)
{
	ENTER(EventSynchronize);
	return event == NULL ? INVALID_HANDLE : event_state(event, true);
}

unsigned cuEventDestroy_v2(struct CUevent_st *event);
EXPORT unsigned cuEventDestroy_v2(struct CUevent_st *event)
{
	ENTER(EventDestroy);
	if (event == NULL)
		return INVALID_HANDLE;
	(void)event_state(event, true);
	free(event);
	events--;
	return OK;
}
