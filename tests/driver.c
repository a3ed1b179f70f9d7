// SPDX-License-Identifier: Apache-2.0
/* A libcuda.so.1 without a GPU: takes what Triton's launchers give it, and keeps what was launched. */

#include <string.h>
#include "cuda.h"

#define SIZE 65536
static unsigned char kept[SIZE];
static int used, count, sizes[64];
static long functions;

void expect(int n, const int *given) {
  count = n;
  memcpy(sizes, given, n * sizeof(int));
  used = 0;
}
int taken(unsigned char *out) {
  memcpy(out, kept, used);
  return used;
}
static void keep(const void *data, int size) {
  if (used + size <= SIZE) memcpy(kept + used, data, size);
  used += size;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  unsigned shape[7] = {config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                       config->blockDimZ, config->sharedMemBytes};
  keep(shape, sizeof shape);
  keep(&config->hStream, 8);
  keep(&f, 8);
  for (unsigned i = 0; i < config->numAttrs; i++) keep(&config->attrs[i].id, sizeof config->attrs[i].id);
  for (int i = 0; i < count; i++) keep(params[i], sizes[i]);
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { *n = 1; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = 227 << 10; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = 1024; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "error"; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) { *f = (CUfunction)++functions; return CUDA_SUCCESS; }
CUresult cuModuleGetGlobal(CUdeviceptr *p, size_t *n, CUmodule m, const char *name) { *p = 1; *n = 4; return CUDA_SUCCESS; }
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t n) { *(int *)to = 128; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *i) { *m = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *v) { *v = 0; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)v = p; return CUDA_SUCCESS; }
