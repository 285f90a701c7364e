/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and contexts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

#define DEVICES 16
#define DEPTH   16

int device_count;
static int physical[DEVICES]; /* of each visible ordinal */
static struct CUctx_st primaries[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static __thread struct CUctx_st *stack[DEPTH];
static __thread int depth;
static _Atomic int pushed;

static void find_devices(void)
{
	const char *all = getenv("KVS_DOUBLE_CUDA_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
	int count = all == NULL ? 2 : atoi(all);
	char copy[256], *save = NULL;
	count = count > DEVICES ? DEVICES : count;
	if (visible == NULL) {
		for (device_count = 0; device_count < count; device_count++)
			physical[device_count] = device_count;
		return;
	}
	(void)snprintf(copy, sizeof(copy), "%s", visible);
	for (char *one = strtok_r(copy, ",", &save); one != NULL && device_count < DEVICES;
	     one = strtok_r(NULL, ",", &save)) {
		if (atoi(one) < 0 || atoi(one) >= count)
			break;
		physical[device_count++] = atoi(one);
	}
}

static int devices(void)
{
	pthread_once(&once, find_devices);
	return device_count;
}

bool device_uuid(int device, struct kvs_cu_uuid *uuid_p)
{
	if (device < 0 || device >= devices())
		return false;
	memset(uuid_p, 0, sizeof(*uuid_p));
	memcpy(uuid_p->bytes, "kvsplice-gpu", 12);
	uuid_p->bytes[15] = (char)physical[device];
	return true;
}

int device_of_uuid(const struct kvs_cu_uuid *uuid)
{
	struct kvs_cu_uuid one;
	for (int i = 0; i < devices(); i++) {
		if (device_uuid(i, &one) && memcmp(one.bytes, uuid->bytes, sizeof(one.bytes)) == 0)
			return i;
	}
	return -1;
}

bool peers(int device, int other)
{
	const char *none = getenv("KVS_DOUBLE_CUDA_NO_PEER");
	return device == other || none == NULL || atoi(none) == 0;
}

struct CUctx_st *current(void)
{
	return depth > 0 ? stack[depth - 1] : NULL;
}

struct CUctx_st *primary(int device)
{
	primaries[device].device = device;
	primaries[device].primary = true;
	return &primaries[device];
}

int live_pushed(void)
{
	return pushed;
}

int live_retained(void)
{
	int sum = 0;
	for (int i = 0; i < DEVICES; i++)
		sum += primaries[i].retained;
	return sum;
}

unsigned cuDeviceGetCount(int *count_p);
EXPORT unsigned cuDeviceGetCount(int *count_p)
{
	ENTER(DeviceGetCount);
	*count_p = devices();
	return OK;
}

unsigned cuDeviceGet(int *device_p, int ordinal);
EXPORT unsigned cuDeviceGet(int *device_p, int ordinal)
{
	ENTER(DeviceGet);
	*device_p = ordinal;
	return ordinal >= 0 && ordinal < devices() ? OK : INVALID_DEVICE;
}

unsigned cuDeviceGetUuid(struct kvs_cu_uuid *uuid_p, int device);
EXPORT unsigned cuDeviceGetUuid(struct kvs_cu_uuid *uuid_p, int device)
{
	ENTER(DeviceGetUuid);
	return device_uuid(device, uuid_p) ? OK : INVALID_DEVICE;
}

unsigned cuDeviceGetAttribute(int *value_p, unsigned attribute, int device);
EXPORT unsigned cuDeviceGetAttribute(int *value_p, unsigned attribute, int device)
{
	ENTER(DeviceGetAttribute);
	if (device < 0 || device >= devices())
		return INVALID_DEVICE;
	*value_p = attribute == KVS_CU_DEVICE_MULTIPROCESSORS ? 2
	           : attribute == KVS_CU_DEVICE_MAX_PITCH     ? 0x7fffffff
	                                                      : rdma_attribute(attribute);
	return OK;
}

unsigned cuDeviceCanAccessPeer(int *can_p, int device, int peer);
EXPORT unsigned cuDeviceCanAccessPeer(int *can_p, int device, int peer)
{
	ENTER(DeviceCanAccessPeer);
	if (device < 0 || device >= devices() || peer < 0 || peer >= devices())
		return INVALID_DEVICE;
	*can_p = device != peer && peers(device, peer);
	return OK;
}

unsigned cuDevicePrimaryCtxGetState(int device, unsigned *flags_p, int *active_p);
EXPORT unsigned cuDevicePrimaryCtxGetState(int device, unsigned *flags_p, int *active_p)
{
	ENTER(DevicePrimaryCtxGetState);
	if (device < 0 || device >= devices())
		return INVALID_DEVICE;
	*flags_p = 0;
	*active_p = primary(device)->active;
	return OK;
}

unsigned cuDevicePrimaryCtxRetain(struct CUctx_st **context_p, int device);
EXPORT unsigned cuDevicePrimaryCtxRetain(struct CUctx_st **context_p, int device)
{
	ENTER(DevicePrimaryCtxRetain);
	if (device < 0 || device >= devices())
		return INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	*context_p = primary(device);
	(*context_p)->retained++;
	(*context_p)->active = true;
	pthread_mutex_unlock(&lock);
	return OK;
}

unsigned cuDevicePrimaryCtxRelease_v2(int device);
EXPORT unsigned cuDevicePrimaryCtxRelease_v2(int device)
{
	ENTER(DevicePrimaryCtxRelease);
	pthread_mutex_lock(&lock);
	struct CUctx_st *context = primary(device);
	if (context->retained > 0 && --context->retained == 0)
		context->active = false;
	pthread_mutex_unlock(&lock);
	return OK;
}

unsigned cuCtxCreate_v2(struct CUctx_st **context_p, unsigned flags, int device);
EXPORT unsigned cuCtxCreate_v2(struct CUctx_st **context_p, unsigned flags, int device)
{
	ENTER(CtxCreate);
	(void)flags;
	if (device < 0 || device >= devices() || depth == DEPTH)
		return INVALID_DEVICE;
	struct CUctx_st *made = calloc(1, sizeof(*made));
	if (made == NULL)
		return OUT_OF_MEMORY;
	made->device = device;
	made->active = true;
	stack[depth++] = made;
	*context_p = made;
	return OK;
}

unsigned cuCtxDestroy_v2(struct CUctx_st *context);
EXPORT unsigned cuCtxDestroy_v2(struct CUctx_st *context)
{
	ENTER(CtxDestroy);
	if (current() == context)
		depth--;
	context->active = false; /* kept: memory may still name it */
	return OK;
}

unsigned cuCtxPushCurrent_v2(struct CUctx_st *context);
EXPORT unsigned cuCtxPushCurrent_v2(struct CUctx_st *context)
{
	ENTER(CtxPushCurrent);
	if (context == NULL || !context->active || depth == DEPTH)
		return INVALID_CONTEXT;
	stack[depth++] = context;
	pushed++;
	return OK;
}

unsigned cuCtxPopCurrent_v2(struct CUctx_st **context_p);
EXPORT unsigned cuCtxPopCurrent_v2(struct CUctx_st **context_p)
{
	ENTER(CtxPopCurrent);
	if (depth == 0)
		return INVALID_CONTEXT;
	*context_p = stack[--depth];
	pushed--;
	return OK;
}

unsigned cuCtxSetCurrent(struct CUctx_st *context);
EXPORT unsigned cuCtxSetCurrent(struct CUctx_st *context)
{
	ENTER(CtxSetCurrent);
	if (depth > 0)
		depth--;
	if (context != NULL)
		stack[depth++] = context;
	return OK;
}

unsigned cuCtxGetCurrent(struct CUctx_st **context_p);
EXPORT unsigned cuCtxGetCurrent(struct CUctx_st **context_p)
{
	ENTER(CtxGetCurrent);
	*context_p = current();
	return OK;
}

unsigned cuCtxGetDevice(int *device_p);
EXPORT unsigned cuCtxGetDevice(int *device_p)
{
	ENTER(CtxGetDevice);
	if (current() == NULL)
		return INVALID_CONTEXT;
	*device_p = current()->device;
	return OK;
}

unsigned cuCtxGetStreamPriorityRange(int *least_p, int *greatest_p);
EXPORT unsigned cuCtxGetStreamPriorityRange(int *least_p, int *greatest_p)
{
	ENTER(CtxGetStreamPriorityRange);
	if (current() == NULL)
		return INVALID_CONTEXT;
	*least_p = 0;
	*greatest_p = -5;
	return OK;
}
