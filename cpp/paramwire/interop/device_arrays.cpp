#include "paramwire/interop/device_arrays.hpp"

#if PARAMWIRE_HAVE_CUDA
#include "paramwire/interop/cuda_arrays.hpp"
#endif

namespace paramwire {

Result<std::shared_ptr<DeviceArrays>> DeviceArrays::open() {
#if PARAMWIRE_HAVE_CUDA
  PARAMWIRE_TRY(driver, cuda::open_driver());
  return open_cuda_arrays(std::move(driver));
#else
  return Error(Code::kUnavailable, "this build is without CUDA: build it with -DPARAMWIRE_CUDA=ON (it needs nvcc 13)");
#endif
}

}  // namespace paramwire
