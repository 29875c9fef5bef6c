/* A library with the names that libcuda.so.1 of CUDA 13.0 exports for what paramwire calls, for tests of how the driver is found; every function says
   CUDA_ERROR_STUB_LIBRARY (34) as the toolkit's stub does. STUB_WITHOUT_GRAPH_UPLOAD leaves one out. */
#define STUB(name) \
  int name(void) { return 34; }

STUB(cuInit) STUB(cuDriverGetVersion) STUB(cuGetErrorName) STUB(cuGetErrorString)
STUB(cuDeviceGetCount) STUB(cuDeviceGet) STUB(cuDeviceGetName) STUB(cuDeviceGetAttribute) STUB(cuDeviceTotalMem_v2)
STUB(cuDevicePrimaryCtxRetain) STUB(cuDevicePrimaryCtxRelease_v2) STUB(cuCtxPushCurrent_v2) STUB(cuCtxPopCurrent_v2)
STUB(cuMemGetInfo_v2) STUB(cuMemAlloc_v2) STUB(cuMemFree_v2) STUB(cuMemHostAlloc) STUB(cuMemFreeHost) STUB(cuPointerGetAttributes)
STUB(cuMemcpyHtoDAsync_v2) STUB(cuMemcpyDtoHAsync_v2) STUB(cuMemcpyDtoDAsync_v2) STUB(cuMemsetD8Async)
STUB(cuStreamCreate) STUB(cuStreamDestroy_v2) STUB(cuStreamSynchronize) STUB(cuStreamQuery) STUB(cuStreamWaitEvent)
STUB(cuStreamIsCapturing) STUB(cuStreamBeginCapture_v2) STUB(cuStreamEndCapture) STUB(cuThreadExchangeStreamCaptureMode)
STUB(cuEventCreate) STUB(cuEventDestroy_v2) STUB(cuEventRecord) STUB(cuEventQuery) STUB(cuEventSynchronize) STUB(cuEventElapsedTime_v2)
STUB(cuGraphInstantiateWithFlags) STUB(cuGraphLaunch) STUB(cuGraphExecDestroy) STUB(cuGraphDestroy)
STUB(cuLibraryLoadData) STUB(cuLibraryUnload) STUB(cuLibraryGetKernel) STUB(cuKernelGetFunction) STUB(cuLaunchKernel)
#ifndef STUB_WITHOUT_GRAPH_UPLOAD
STUB(cuGraphUpload)
#endif
