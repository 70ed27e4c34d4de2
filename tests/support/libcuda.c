/* A CUDA driver of one GPU of FAKE_SMS multiprocessors in groups of 8, without a GPU, for cuda-python's bindings. Each call is
   a line of the file FAKE_LOG; the one named FAKE_FAILS returns CUDA_ERROR_NOT_SUPPORTED. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500, NOT_SUPPORTED = 801, SM = 1, GROUP = 8 };

typedef struct {
    int type;
    unsigned char padding[92];
    unsigned num_sms, rest[9];
    void *next;
} resource;

static uintptr_t next_handle = 16;

static int called(const char *name, long a, long b, long c) {
    FILE *log = fopen(getenv("FAKE_LOG"), "a");
    fprintf(log, "%s %ld %ld %ld\n", name, a, b, c);
    fclose(log);
    const char *failing = getenv("FAKE_FAILS");
    return failing != NULL && strcmp(failing, name) == 0 ? NOT_SUPPORTED : SUCCESS;
}

static unsigned num_sms(void) { return (unsigned)atoi(getenv("FAKE_SMS")); }

int cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    char later[128];
    snprintf(later, sizeof later, "%s_v2", symbol);
    *found = dlsym(RTLD_DEFAULT, later);
    Dl_info own, other;
    dladdr((void *)called, &own);
    void *self = dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *found = dlsym(self, later);
    if (*found == NULL) *found = dlsym(self, symbol);
    if (*found != NULL && (!dladdr(*found, &other) || other.dli_fbase != own.dli_fbase)) *found = NULL;
    if (status != NULL) *status = *found == NULL;
    return *found == NULL ? NOT_FOUND : SUCCESS;
}

int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }

int cuInit(unsigned flags) { return called("cuInit", flags, 0, 0); }

int cuDeviceGet(int *device, int ordinal) { return *device = 7, called("cuDeviceGet", ordinal, 0, 0); }

int cuDeviceGetDevResource(int device, resource *out, int type) {
    memset(out, 0, sizeof *out);
    out->type = SM, out->num_sms = num_sms();
    return type == SM ? called("cuDeviceGetDevResource", device, type, 0) : INVALID_VALUE;
}

/* As the driver: the first group, rounded up, and what remains. */
int cuDevSmResourceSplitByCount(resource *groups, unsigned *num_groups, const resource *all, resource *rest, unsigned flags,
                                unsigned least) {
    unsigned num = (least + GROUP - 1) / GROUP * GROUP;
    if (*num_groups != 1 || flags != 0 || all->num_sms != num_sms()) return INVALID_VALUE;
    *rest = *all;
    if (num > all->num_sms) return *num_groups = 0, called("cuDevSmResourceSplitByCount", least, 0, 0);
    groups[0] = *all, groups[0].num_sms = num, rest->num_sms = all->num_sms - num;
    return called("cuDevSmResourceSplitByCount", least, num, rest->num_sms);
}

int cuDevResourceGenerateDesc(uintptr_t *description, resource *parts, unsigned num) {
    if (num != 1 || parts[0].type != SM) return INVALID_VALUE;
    *description = next_handle++;
    return called("cuDevResourceGenerateDesc", *description, parts[0].num_sms, 0);
}

int cuGreenCtxCreate(uintptr_t *context, uintptr_t description, int device, unsigned flags) {
    if (device != 7 || flags != 1) return INVALID_VALUE;
    *context = next_handle++;
    return called("cuGreenCtxCreate", *context, description, 0);
}

int cuGreenCtxStreamCreate(uintptr_t *stream, uintptr_t context, unsigned flags, int priority) {
    if (flags != 1) return INVALID_VALUE;
    *stream = next_handle++;
    return called("cuGreenCtxStreamCreate", *stream, context, priority);
}

int cuStreamDestroy_v2(uintptr_t stream) { return called("cuStreamDestroy", stream, 0, 0); }

int cuGreenCtxDestroy(uintptr_t context) { return called("cuGreenCtxDestroy", context, 0, 0); }
