// SPDX-License-Identifier: Apache-2.0
/* Linked with the host object that the CuTe DSL exports for one kernel: its calls of the DSL's runtime come here first.

   Loads the translated cubin in place of the embedded one, and turns tensor maps of 4-bit elements into maps of bytes at
   each launch.  ENTRIES names a generated header: the kernels, and the sizes of their parameters with 4-bit maps marked. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct entry {
    const char *name;
    int parameters;
    const int *kinds; /* 0 no tensor map, 1 a tensor map, 2 one of 4-bit elements */
};
#include ENTRIES

__asm__(".pushsection .rodata\n.balign 64\ntranslated_cubin:\n.incbin \"" CUBIN "\"\n.popsection\n");
extern const char translated_cubin[] __attribute__((visibility("hidden")));

enum { INVALID_VALUE = 1, ELEMENT_U8 = 0, ELEMENT_16U4_ALIGN8B = 11 };

/* 32-bit words of a tensor map on sm_90 and sm_120, read off cuTensorMapEncodeTiled: 0-1 address; 2 bits 7-10 element type; 3-7 strides
   in units of 16 bytes; 8-12 extents less one; bytes 0x37 to 0x3B box extents less one.  Strides and swizzles are counted in
   bytes and stay; what counts elements of the first dimension is halved.  Returns whether the elements had 4 bits. */
int b12x_rewrite_tensor_map(uint32_t *map) {
    uint8_t *box = (uint8_t *)map + 0x37;
    if ((map[2] >> 7 & 15) != ELEMENT_16U4_ALIGN8B) return 0;
    map[2] = (map[2] & ~(15u << 7)) | ELEMENT_U8 << 7;
    map[8] = (map[8] + 1) / 2 - 1;
    *box = (uint8_t)((*box + 1) / 2 - 1);
    return 1;
}

static void *handles[ENTRY_COUNT];

static void *runtime(const char *name) {
    void *library = dlopen("libcute_dsl_runtime.so", RTLD_NOW | RTLD_NOLOAD);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) fprintf(stderr, "sm12x_on_hopper: the CuTe DSL's runtime is not loaded or has no %s\n", name);
    return function;
}

int _cudaLibraryLoadData(void *library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    int (*load)(void *, const void *, void *, void *, unsigned, void *, void *, unsigned) = runtime(__func__);
    return load ? load(library, translated_cubin, a, b, c, d, e, f) : INVALID_VALUE;
}

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    int (*get)(void **, void *, const char *) = runtime(__func__);
    int status = get ? get(kernel, library, name) : INVALID_VALUE;
    for (int i = 0; !status && i < ENTRY_COUNT; i++)
        if (!strcmp(name, entries[i].name)) handles[i] = *kernel;
    return status;
}

int _cudaLaunchKernelEx(const void *config, void *kernel, void **arguments) {
    static int (*launch)(const void *, void *, void **);
    const struct entry *entry = NULL;
    if (!launch) launch = runtime(__func__);
    for (int i = 0; i < ENTRY_COUNT; i++)
        if (handles[i] == kernel) entry = &entries[i];
    if (!launch || !entry) return INVALID_VALUE;
    for (int i = 0; i < entry->parameters; i++)
        if (entry->kinds[i] && b12x_rewrite_tensor_map(arguments[i]) != (entry->kinds[i] == 2)) {
            fprintf(stderr, "sm12x_on_hopper: parameter %d of %s has other elements than the translation took it for\n", i, entry->name);
            return INVALID_VALUE;
        }
    return launch(config, kernel, arguments);
}
